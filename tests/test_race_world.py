"""The race: rules on flights made by hand, and the world that flies."""
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlnb.race.levels import load_level
from rlnb.race.world import Outcome, RaceSimulator, RaceWorld, judge
from rlnb.tracker.dynamics import Body, Quadrotor, Simulator, attitude_to_action, hover_rpm, quaternion

LEVEL_0, LEVEL_3 = replace(load_level(0), steps=40), replace(load_level(3), steps=40)
SEEDS = [0, 1, 2, 3, 4, 48]  # 48 begins inside a pole


JUDGE = jax.jit(judge, static_argnums=(0, 1))


@pytest.fixture(scope="module")
def world():
    return RaceWorld(LEVEL_3, len(SEEDS))


@pytest.fixture(scope="module")
def step(world):
    return jax.jit(world.step)


@pytest.fixture(scope="module")
def fixed():
    "The beginning of a race on the fixed course, one world; gate 0's pose."
    state = RaceWorld(LEVEL_0, 1).reset([1])
    return state, np.asarray(state.course.gate_position[0]), np.asarray(state.course.gate_rotation[0])


def replay(state, positions, level=LEVEL_0, arena=None):
    "Judge a level drone along `positions` (steps, 3) m of one world."
    still = jnp.zeros((1, 3))
    for before, after in itertools.pairwise(positions):
        bodies = [Body(jnp.asarray(p, jnp.float32)[None], jnp.array([[0.0, 0, 0, 1]]), still, still) for p in (before, after)]
        state = JUDGE(level, arena or level.arena, state, *bodies)
    return state


@pytest.mark.parametrize("local, outcome, target", [
    ([(-0.2, 0, 0), (-0.1, 0, 0), (0.15, 0, 0)], "flying", 1),  # through
    ([(0.2, 0, 0), (-0.2, 0, 0)], "flying", 0),  # backwards
    ([(-0.2, 0, 0.6), (0.2, 0, 0.6)], "flying", 0),  # over
    ([(-0.2, 0.6, 0), (0.2, 0.6, 0)], "flying", 0),  # beside
    ([(-0.2, -0.4, 0), (0.2, 0.4, 0)], "flying", 1),  # diagonally, through
    ([(-0.2, 0.1, 0), (0.2, 0.6, 0)], "flying", 0),  # diagonally, beside
    ([(-0.2, 0, 0), (0.05, 0, 0.21)], "frame", 0),  # through, and into the top side: a failure comes first
    ([(-0.2, 0, 0), (0.0, 0, -0.21)], "frame", 0),  # bottom
    ([(-0.2, 0, 0), (0.0, 0.25, 0)], "frame", 0),  # left
    ([(-0.2, 0, 0), (0.0, -0.25, 0)], "frame", 0),  # right
    ([(-0.2, 0, 0), (-0.05, 0, -0.5)], "stand", 0),
    ([(-0.2, 0, 0), (0.0, 0, 0), (0.2, 0, 0)], "flying", 0),  # exactly on the plane is neither before nor behind it
])
def test_flights_at_a_gate(fixed, local, outcome, target):
    state, centre, matrix = fixed
    end = replay(state, centre[0] + np.array(local) @ matrix[0].T)
    assert Outcome(int(end.outcome[0])).name == outcome and end.target[0] == target
    assert end.alive[0] == (outcome == "flying") and end.hit[0] == (-1 if outcome == "flying" else 0)


def test_gates_count_in_their_order_only(fixed):
    state, centre, matrix = fixed
    pairs = [[c - 0.2 * m[:, 0], c + 0.2 * m[:, 0]] for c, m in zip(centre, matrix)]

    def fly(*order):
        return replay(state, np.concatenate([pairs[i] for i in order]))

    assert fly(0, 1, 2).target[0] == 3 and fly(1, 2, 3).target[0] == 0 and fly(0, 0, 0).target[0] == 1 and fly(0, 2, 1).target[0] == 2
    done = fly(0, 1, 2, 3, 3, 2)
    assert Outcome(int(done.outcome[0])) is Outcome.finished and done.target[0] == 4 and not done.alive[0]
    assert done.finish_step[0] == done.step[0] == 7, "what comes after the last gate changes nothing"


def test_a_pole_is_hit_and_named(fixed):
    state = fixed[0]
    pole = np.asarray(state.course.pole[0, 2])
    end = replay(state, [pole + np.array([away, 0, -1]) for away in (0.3, 0.09, 0.08, 0.3)])
    assert Outcome(int(end.outcome[0])) is Outcome.pole and end.hit[0] == 2 and end.finish_step[0] == 2


@pytest.mark.parametrize("off, outcome", [
    ((0.019, -0.019), "flying"), ((0.0, 0.0), "flying"), ((0.021, 0.0), "arena"), ((0.0, -0.021), "arena")])
def test_the_take_off_square(fixed, off, outcome):
    "On the floor, where crazyflow holds a drone, one may be only within 2 cm of the start."
    state = fixed[0]
    start = np.asarray(state.course.start_position[0])
    down = [start[0] + off[0], start[1] + off[1], -0.001]
    assert Outcome(int(replay(state, [start, down]).outcome[0])).name == outcome
    assert replay(state, [start, [*down[:2], 0.0005]]).alive[0], "a hair above the floor is flying"


@pytest.mark.parametrize("spot, inside, upstream", [
    ((2.49, 1.49, 1.99), True, True), ((2.51, 0, 1), False, True), ((-2.51, 0, 1), False, True), ((0, 1.51, 1), False, True),
    ((0, -1.51, 1), False, True), ((0, 0, 2.01), False, True),
    ((3.01, 0, 1), False, False), ((0, -3.01, 1), False, False), ((0, 0, 2.51), False, False)])
def test_the_arena(fixed, spot, inside, upstream):
    state = fixed[0]
    assert replay(state, [spot, spot]).alive[0] == inside
    assert replay(state, [spot, spot], arena=RaceWorld(LEVEL_0, 1, bounds="upstream").arena).alive[0] == upstream


def test_sensing_is_horizontal_sharp_and_lasting(fixed):
    state, centre, _ = fixed
    pole = np.asarray(state.course.pole[0, 3])
    assert not state.gate_seen[0, 1] and not state.pole_seen[0, 3]
    far = [1.05, -1.4, 1.0]  # more than .7 m from gate 1 and pole 3

    def visit(place, distance):
        return replay(state, [far, [place[0] + distance * 0.6, place[1] - distance * 0.8, 1.9], far])

    assert not visit(centre[1], 0.71).gate_seen[0, 1] and visit(centre[1], 0.69).gate_seen[0, 1]
    assert not visit(pole, 0.71).pole_seen[0, 3] and visit(pole, 0.69).pole_seen[0, 3]


def test_time_runs_out(fixed):
    end = replay(fixed[0], [[0.0, 0.0, 1.9]] * 50)
    assert Outcome(int(end.outcome[0])) is Outcome.timeout and end.step[0] == end.finish_step[0] == 40


def test_passing_the_last_gate_at_the_last_step_is_a_finish(fixed):
    state, centre, matrix = fixed
    late = state.replace(step=jnp.array([39]), target=jnp.array([3]))
    end = replay(late, [centre[3] - 0.2 * matrix[3][:, 0], centre[3] + 0.2 * matrix[3][:, 0]])
    assert Outcome(int(end.outcome[0])) is Outcome.finished


def rise(count):
    "Normalised action (count, 4): level, with a thrust that lifts any drone of level 3."
    drone = Quadrotor()
    return jnp.broadcast_to(attitude_to_action(jnp.array([0.0, 0, 0, 1.3 * drone.mass * 9.81]), drone), (count, 4))


@pytest.fixture(scope="module")
def flown(world, step):
    "The world's races after 30 steps upwards."
    state = world.reset(SEEDS)
    for _ in range(30):
        state = step(state, rise(len(SEEDS)))
    return state


def test_a_batch_is_many_single_worlds(world, flown):
    single = RaceWorld(LEVEL_3, 1)
    alone = jax.jit(single.step)
    for index in (1, 5):
        state = single.reset([SEEDS[index]])
        for _ in range(30):
            state = alone(state, rise(1))
        for name in ("outcome", "hit", "finish_step", "step", "target", "gate_seen", "pole_seen"):
            assert getattr(state, name)[0].tolist() == getattr(flown, name)[index].tolist(), name
        for a, b in zip(jax.tree.leaves(single.body(state)), jax.tree.leaves(world.body(flown))):
            np.testing.assert_allclose(a[0], b[index], atol=1e-4)


def test_who_starts_inside_something_fails_and_stays(world, flown):
    start = world.reset(SEEDS).course.start_position[5]
    assert Outcome(int(flown.outcome[5])) is Outcome.pole and flown.finish_step[5] == flown.step[5] == 1 and not flown.alive[5]
    np.testing.assert_allclose(world.body(flown).position[5], start, atol=0.01)
    assert np.all(np.asarray(flown.step)[:5] == 30) and np.all(np.asarray(world.body(flown).position)[:5, 2] > 0.1)


def test_sensed_poses(world, flown):
    sensed, course = world.sense(flown), flown.course
    for seen, shown, true, nominal in ((flown.gate_seen, sensed.gate_position, course.gate_position, course.nominal_gate_position),
                                       (flown.gate_seen, sensed.gate_rotation, course.gate_rotation, course.nominal_gate_rotation),
                                       (flown.pole_seen, sensed.pole, course.pole, course.nominal_pole)):
        seen = np.asarray(seen)
        assert 0 < seen.sum() < seen.size
        np.testing.assert_array_equal(np.asarray(shown)[seen], np.asarray(true)[seen])
        np.testing.assert_array_equal(np.asarray(shown)[~seen], np.asarray(nominal)[~seen])
        assert not np.allclose(np.asarray(true), np.asarray(nominal), atol=0.01)


def test_one_broken_world_does_not_spoil_the_others(world, step):
    state = world.reset(SEEDS)
    well = step(step(state, rise(6)), rise(6))
    states = state.data.states
    ill = state.replace(data=state.data.replace(states=states.replace(vel=states.vel.at[2].set(jnp.nan))))
    ill = step(step(ill, rise(6)), rise(6))
    assert Outcome(int(ill.outcome[2])) is Outcome.not_finite and ill.finish_step[2] == 1 and ill.step[2] == 1
    others = np.array([0, 1, 3, 4, 5])
    np.testing.assert_array_equal(np.asarray(ill.outcome)[others], np.asarray(well.outcome)[others])
    np.testing.assert_array_equal(np.asarray(world.body(ill).position)[others], np.asarray(world.body(well).position)[others])


def test_forces_act_at_their_physics_step():
    "The same constant force as the tracker's simulator applies gives the same flight; ten different ones push by their sum."
    race, plain, drone = RaceSimulator(2), Simulator(2), Quadrotor()
    body = Body(jnp.array([[0.0, 0, 1]] * 2), quaternion(jnp.zeros((2, 3))), jnp.zeros((2, 3)), jnp.zeros((2, 3)))
    begin = plain.place(plain.template, jnp.ones(2, bool), body, jnp.full(2, hover_rpm(drone)))
    hover = jnp.broadcast_to(jnp.array([0.0, 0, 0, drone.mass * 9.81]), (2, 4))
    push = jnp.array([[0.05, 0.0, -0.02], [0.0, 0.0, 0.0]])
    fly = jax.jit(race.fly)
    a = plain.body(plain.step(begin, attitude_to_action(hover, drone), push))
    b = race.body(fly(begin, hover, jnp.repeat(push[:, None], 10, axis=1)))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        np.testing.assert_allclose(x, y, atol=1e-6)
    forces = jax.random.uniform(jax.random.key(0), (2, 10, 3), minval=-0.1, maxval=0.1).at[1].set(0.0)
    v = race.body(fly(begin, hover, forces)).velocity
    np.testing.assert_allclose(v[0, :2] - v[1, :2], forces[0, :, :2].sum(axis=0) * 0.002 / drone.mass, rtol=0.05, atol=1e-4)


def test_mass_and_inertia_of_each_world_reach_the_physics(world, step):
    state = world.reset(SEEDS)
    np.testing.assert_allclose(state.data.params.mass[:, 0, 0], state.course.mass)
    np.testing.assert_allclose(np.diagonal(state.data.params.J[:, 0], axis1=1, axis2=2), state.course.inertia)
    np.testing.assert_allclose(state.data.params.J[:, 0] @ state.data.params.J_inv[:, 0], np.broadcast_to(np.eye(3), (6, 3, 3)), atol=1e-6)
    heavy = state.replace(data=state.data.replace(params=state.data.params.replace(mass=state.data.params.mass * 1.2)))
    for _ in range(20):
        state, heavy = step(state, rise(6)), step(heavy, rise(6))
    alive = np.asarray(state.alive)
    assert alive.sum() == 5 and np.all((world.body(state).position - world.body(heavy).position)[alive, 2] > 0.005)


def test_the_other_physics_flies_too():
    fast = RaceWorld(LEVEL_3, 2, physics="so_rpy")
    state, fly = fast.reset([1, 2]), jax.jit(fast.step)
    for _ in range(20):
        state = fly(state, rise(2))
    assert np.all(np.asarray(fast.body(state).position[:, 2]) > 0.05) and state.step.tolist() == [20, 20]


def test_what_a_world_refuses(world):
    with pytest.raises(ValueError, match="bounds is 'wide': it is one of 'file', 'upstream'"):
        RaceWorld(LEVEL_3, 1, bounds="wide")
    with pytest.raises(ValueError, match="2 seeds for 6 worlds"):
        world.reset([1, 2])
