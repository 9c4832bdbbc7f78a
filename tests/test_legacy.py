"""Older layouts, their reward, the aperture diagnostic and robustness: known answers on hand-made flights."""
import rlnb.tracker  # noqa: F401  first: it sets the flag that crazyflow wants before Brax imports SciPy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from rlnb.lab.gates import check, load_gates
from rlnb.tracker.aperture import APERTURE, Gates, gates_on, measure_aperture, passages, surroundings, touches
from rlnb.tracker.baseline import HandPilot
from rlnb.tracker.checkpoints import CheckpointError, Metadata, load_policy, save_checkpoint
from rlnb.tracker.commands import DT, Command, Kind, draw_sequence, phase_table
from rlnb.tracker.dynamics import Body, Physics, quaternion
from rlnb.tracker.environment import Disturbance, active
from rlnb.tracker.exams import Examiner, Flights
from rlnb.tracker.layouts import EVERY_LAYOUT, V1, V2, PlannerPhase, Surroundings, find_layout, observe_as
from rlnb.tracker.legacy import LegacyTrackerReward, legacy_terms
from rlnb.tracker.observations import LAYOUTS, V3, first_memory, observe, to_features
from rlnb.tracker.ppo import Learner, PPOConfig, TrainState
from rlnb.tracker.rewards import Outcome, ReferenceCommandReward, reward_terms
from rlnb.tracker.robustness import CASES, DisturbedExaminer, robustness

OF_GATES = ("gate", "aperture", "obstacle", "pole", "planner", "race", "lap", "finish")


def scene(position=(0.0, 0, 1), velocity=(0.5, 0, 0), target=(0.0, 0, 1), yaw=0.0, kind=Kind.pass_through) -> tuple[Body, Command]:
    "One drone, and a reference at `target` that rolls along x at 0.5 m/s."
    place, motion, point = (jnp.array([v], jnp.float32) for v in (position, velocity, target))
    body = Body(place, quaternion(jnp.array([[0.0, 0, yaw]])), motion, jnp.zeros((1, 3)))
    ahead = [point + jnp.array([[metres, 0, 0]]) for metres in (0.0, 0.05, 0.1)]
    return body, Command(*ahead, velocity=jnp.array([[0.5, 0, 0]]), speed=jnp.array([0.5]), heading=jnp.zeros(1), kind=jnp.array([kind]),
                         brake=jnp.array([False]), rolling=jnp.array([True]))


def around(gate=(-1.0, 0.1, 0.05), obstacle=(0.0, -0.3, 0.4), detected=True, phase=PlannerPhase.cruise, crossed=False) -> Surroundings:
    return Surroundings(jnp.array([gate]), jnp.array([obstacle]), jnp.array([detected]), jnp.array([phase]), jnp.array([crossed]))


# --- layouts


def test_sizes_and_order_of_the_older_layouts():
    assert (V1.name, V1.size) == ("level3_reference_tracker_v1", 65)
    assert (V2.name, V2.size) == ("level3_reference_tracker_semantic_v2", 72)
    names = [f.name for f in V3.fields]
    new = ["gate_position", "aperture", "obstacle", "obstacle_seen", "planner_phase"]
    assert [f.name for f in V1.fields] == names[:-2] + new and [f.name for f in V2.fields] == names[:-2] + new + ["kind", "masks"]
    assert sum(f.size for f in V1.fields if f.name in new) == 3 + 2 + 3 + 2 + 6


def test_v3_holds_nothing_of_gates_and_the_older_ones_do():
    tells = lambda layout: [f.name for f in layout.fields if any(word in f.name + f.meaning for word in OF_GATES)]  # noqa: E731
    of_gates = {layout.name: tells(layout) for layout in EVERY_LAYOUT.values()}
    assert of_gates[V3.name] == [] and len(of_gates[V1.name]) == len(of_gates[V2.name]) == 5
    assert list(LAYOUTS) == [V3.name] and set(EVERY_LAYOUT) == {V1.name, V2.name, V3.name}


def test_what_stands_where_in_v1_and_v2():
    body, order = scene(kind=Kind.low_speed_through)
    memory = first_memory(body, jnp.zeros((1, 4)))
    v1, v2, v3 = observe_as(V1, body, order, memory, around()), observe_as(V2, body, order, memory, around()), observe(body, order, memory)
    np.testing.assert_array_equal(v1[:, :49], v3[:, :49])
    np.testing.assert_array_equal(v2, jnp.concatenate([v1, v3[:, 49:]], axis=-1))
    np.testing.assert_allclose(v1[0, 49:], [-1, 0.1, 0.05, 0.5, 0.25, 0, -0.3, 0.4, 0.5, 1, 0, 1, 0, 0, 0, 0], atol=1e-6)
    np.testing.assert_array_equal(to_features(v1)[:, :49], to_features(v3)[:, :49])


def test_an_obstacle_that_is_not_seen_is_not_told():
    body, order = scene()
    memory = first_memory(body, jnp.zeros((1, 4)))
    seen = observe_as(V1, body, order, memory, around(detected=False))
    np.testing.assert_allclose(seen[0, V1.columns("obstacle")], 0)
    np.testing.assert_allclose(seen[0, V1.columns("obstacle_seen")], [0.7, 0], atol=1e-6)


def test_a_layout_with_too_much_or_too_little_is_refused():
    body, order = scene()
    memory = first_memory(body, jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match="holds nothing of gates"):
        observe_as(V3, body, order, memory, around())
    with pytest.raises(ValueError, match="tells of a gate"):
        observe_as(V1, body, order, memory)
    with pytest.raises(ValueError, match=V2.name):
        find_layout("level3_reference_tracker_v4")


class Shape:
    "What a learner needs to know of an environment."

    action_size, features = 4, staticmethod(to_features)

    def __init__(self, size: int):
        self.observation_size = size


def test_a_checkpoint_of_an_older_layout_loads_as_such_and_as_nothing_else(tmp_path):
    learner = Learner(Shape(V1.size), PPOConfig(hidden=(8,)))
    policy = learner.init_policy(jax.random.key(0))
    optimisers = learner.optimiser.init((policy.actor, policy.log_std)), learner.optimiser.init(policy.critic)
    state = TrainState(policy, *optimisers, None, jax.random.key(1), jnp.int32(7))
    folder = save_checkpoint(tmp_path / "7", state, Metadata(step=7, stage="hover", seed=1, layout=V1.name))
    read, about = load_policy(folder, learner, V1.name)
    assert about.layout == V1.name and jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), read, policy))
    for wrong in (V3, V2):
        with pytest.raises(CheckpointError) as refused:
            load_policy(folder, Learner(Shape(wrong.size), PPOConfig(hidden=(8,))), wrong.name)
        assert V1.name in str(refused.value) and wrong.name in str(refused.value)


# --- reward


def outcome(crashed=False, action=(0.0, 0, 0, 0), last=(0.0, 0, 0, 0), **changes) -> Outcome:
    return Outcome(*scene(**changes), jnp.array([action], jnp.float32), jnp.array([last], jnp.float32), jnp.array([crashed]))


def test_the_legacy_weights_are_the_documented_ones():
    w = LegacyTrackerReward()
    assert (w.position, w.velocity, w.heading, w.gate_centre, w.obstacle, w.obstacle_margin) == (3.0, 0.6, 0.35, 1.0, 0.8, 0.28)
    assert (w.action_size, w.action_change, w.progress, w.crash) == (0.02, 0.04, 0.3, 250.0)
    assert (w.gate_crossing, w.gate_recovery, w.gate_linger) == (0, 0, 0)


def test_legacy_terms_worked_out_by_hand():
    case = outcome(crashed=True, action=(0.6, 0.8, 0, 0), last=(0.0, 0.8, 0, 0), target=(0.3, 0.4, 1), velocity=(0.5, 0.3, 0), yaw=0.2)
    beside = around(gate=(-1.0, 0.3, 0.4), obstacle=(0.0, 0.14, 0))
    terms = {name: float(value[0]) for name, value in legacy_terms(LegacyTrackerReward(), case, beside).items()}
    expected = {"position": -1.5, "velocity": -0.18, "heading": -0.07, "progress": 0.15, "action_size": -0.02, "action_change": -0.024,
                "crash": -250, "gate_centre": -0.5, "obstacle": -0.4, "gate_crossing": 0, "gate_recovery": 0, "gate_linger": 0}
    assert set(terms) == set(expected)
    for name, value in expected.items():
        assert terms[name] == pytest.approx(value, abs=1e-5), name


def test_gate_terms_exist_only_where_there_is_a_gate():
    plain = reward_terms(LegacyTrackerReward(), outcome())  # as the environment asks for them
    assert not [name for name in plain if any(word in name for word in OF_GATES)]
    assert not [name for name in reward_terms(ReferenceCommandReward(), outcome()) if any(word in name for word in OF_GATES)]
    assert float(legacy_terms(LegacyTrackerReward(), outcome(), around(obstacle=(0.3, 0, 0)))["obstacle"][0]) == 0  # outside the margin
    assert float(legacy_terms(LegacyTrackerReward(), outcome(), around(obstacle=(0.1, 0, 0), detected=False))["obstacle"][0]) == 0


@pytest.mark.parametrize("x0, x1, y, crossed", [
    (-0.01, 0.01, 0.0, True), (-0.01, 0.01, 0.19, True), (-0.01, 0.01, 0.21, False), (0.01, -0.01, 0.0, False), (-0.03, -0.01, 0.0, False),
    (0.01, 0.03, 0.0, False)])
def test_a_crossing_is_forwards_and_through_the_opening(x0, x1, y, crossed):
    gate = Gates(jnp.array([[1.0, 2, 1]]), jnp.array([0.0]))
    before, now = (jnp.array([[1.0 + x, 2.0 + y, 1.0]]) for x in (x0, x1))
    assert bool(surroundings(now, before, jnp.array([False]), gate).crossed[0]) is crossed


def test_planner_phases_follow_the_place():
    gate = Gates(jnp.zeros((7, 3)), jnp.zeros(7))
    x = jnp.array([-0.9, -0.5, -0.2, 0.0, 0.3, 0.6, -0.9])
    at = jnp.stack([x, 0 * x, 0 * x], axis=-1)
    found = surroundings(at, at, jnp.arange(7) == 6, gate).phase
    p = PlannerPhase
    assert found.tolist() == [p.cruise, p.slowdown, p.align, p.cross, p.cross, p.recover, p.hover]


# --- aperture


def flights(y, z=0.0, backwards=False, yaw=0.0, steps=300, speed=0.5, direction=0.0, tilt=0.0, **changes) -> Flights:
    "Straight flights through the origin at height 1 along `direction` rad, `y` to the left and `z` up; after 4 s they stand."
    y, z, back = np.broadcast_arrays(np.atleast_1d(np.asarray(y, float)), z, backwards)
    n, t = len(y), np.arange(1, steps + 1)
    x = np.minimum(t, 200) * speed * DT - 100.5 * speed * DT  # the plane lies half-way between two steps
    forward = np.stack([np.broadcast_to(x, (n, steps)), np.zeros((n, steps)), np.zeros((n, steps))], -1)
    flown = np.where(back[:, None, None], -forward, forward) + np.stack([0 * y, y, z], -1)[:, None]
    turn = np.array([[np.cos(direction), np.sin(direction), 0], [-np.sin(direction), np.cos(direction), 0], [0, 0, 1]])
    pace = np.broadcast_to(np.where(t < 200, speed, 0.0), (n, steps))
    velocity = np.stack([np.where(back[:, None], -pace, pace), 0 * pace, 0 * pace], -1) @ turn
    none = np.zeros((n, steps))
    made = dict(position=flown @ turn + [0, 0, 1], velocity=velocity, yaw=none + yaw + direction, tilt=none + tilt,
                action=np.zeros((n, steps, 4)), reference=forward @ turn + [0, 0, 1], desired_velocity=velocity, desired_speed=pace,
                heading=none, kind=none.astype(int), phase=none.astype(int), turning=none > 0, start=np.zeros((n, 3)),
                length=np.full(n, steps), crash_step=np.full(n, steps), fixed=np.zeros(n, bool))
    return Flights(**(made | changes))


def gates(n: int, yaw: float = 0.0) -> Gates:
    return Gates(np.tile([0.0, 0, 1], (n, 1)), np.full(n, yaw))


def test_through_beside_and_backwards():
    met = passages(flights([0.03, -0.45, 0.0], [0.04, 0, 0], [False, False, True]), gates(3))
    assert met.valid.tolist() == [True, False, False] and met.forward.tolist() == [True, True, False]
    assert met.step.tolist() == [99, 99, 99] and not met.touched.any()
    np.testing.assert_allclose(met.offset, [[0.03, 0.04], [-0.45, 0], [0, 0]], atol=1e-6)


@given(direction=st.floats(-3.1, 3.1), y=st.floats(-0.11, 0.11), z=st.floats(-0.15, 0.15))
def test_the_offset_at_the_plane_does_not_depend_on_where_the_gate_faces(direction, y, z):
    met = passages(flights([y], [z], direction=direction), gates(1, direction))
    assert met.valid.all()
    np.testing.assert_allclose(met.offset, [[y, z]], atol=1e-5)


def test_the_plane_is_met_between_two_steps():
    climbing = flights([0.0])
    climbing.position[0, :, 2] += 0.04 * (np.arange(300) == 100)  # the step behind the plane is 4 cm higher: 2 cm at the plane
    np.testing.assert_allclose(passages(climbing, gates(1)).offset, [[0, 0.02]], atol=1e-6)


def test_metrics_of_four_flights_by_hand():
    four = flights([0.03, -0.45, 0.0, 0.0], [0.04, 0, 0, 0], [False, False, True, False], crash_step=np.array([300, 300, 300, 50]))
    found = measure_aperture(four, gates(4))
    assert (found["valid_crossing_rate"], found["crash_rate"], found["met_the_plane"], found["episodes"]) == (0.25, 0.25, 3, 4)
    assert found["recovery_rate"] == 0.25
    assert found["aperture_error"] == pytest.approx((0.05 + 0.45 + 0) / 3, abs=1e-6)
    assert found["aperture_y"] == pytest.approx((0.03 + 0.45) / 3, abs=1e-6) and found["aperture_z"] == pytest.approx(0.04 / 3, abs=1e-6)
    assert found["post_gate_speed"] == pytest.approx(0.5, abs=1e-9)  # of the one crossing


def test_a_first_pass_beside_the_gate_is_not_mended_by_a_second():
    loop = flights([0.5])
    x = np.concatenate([np.linspace(-1, 1, 100), np.linspace(1, -1, 100), np.linspace(-1, 1, 100)])
    loop.position[0, :, 0], loop.position[0, 100:, 1] = x, np.concatenate([np.full(100, -0.5), np.zeros(100)])
    met = passages(loop, gates(1))
    assert not met.valid[0] and met.offset[0, 0] == pytest.approx(0.5)


def test_no_recovery_without_settling_on_the_reference():
    away = flights([0.0])
    away.position[0, 250:, 1] += 0.16
    assert measure_aperture(away, gates(1))["recovery_rate"] == 0 and measure_aperture(away, gates(1))["valid_crossing_rate"] == 1
    drifting = flights([0.0])
    drifting.velocity[0, 250:, 1] = 0.21
    assert measure_aperture(drifting, gates(1))["recovery_rate"] == 0


@pytest.mark.parametrize("y, z, yaw, tilt, hit", [
    (0.12, 0, 0, 0, False), (0.14, 0, 0, 0, True), (0.12, 0, np.pi / 4, 0, True), (0, 0.17, 0, 0, False), (0, 0.19, 0, 0, True),
    (0, 0.17, 0, 0.5, True), (0.42, 0, 0, 0, True), (0.44, 0, 0, 0, False), (0, 0.37, 0, 0, True), (0, 0.39, 0, 0, False),
    (0, -0.40, 0, 0, True), (0.13, -0.60, 0, 0, False)])
def test_contact_with_the_frame_and_the_stand(y, z, yaw, tilt, hit):
    assert touches(flights([y], z, yaw=yaw, tilt=tilt), gates(1)).tolist() == [hit]


def test_contact_after_the_end_of_a_flight_does_not_count_and_fast_drones_do_not_slip_through():
    assert not touches(flights([0.3], crash_step=np.array([50])), gates(1)).any()
    assert touches(flights([0.3], speed=7.0), gates(1)).all()  # 14 cm a step through a frame of 2 cm


def test_the_gate_of_the_spec_reads_these_metrics():
    limits = load_gates(ROOT / "data" / "gates.toml")
    good = measure_aperture(flights(np.linspace(-0.1, 0.1, 30)), gates(30)) | {"from_checkpoint": True}
    assert check(limits, "gate_aperture_reference", good).passed
    missed = measure_aperture(flights(np.zeros(30), crash_step=np.full(30, 50)), gates(30)) | {"from_checkpoint": True}
    assert "aperture_error" not in missed and not check(limits, "gate_aperture_reference", missed).passed


def test_every_reference_leads_straight_through_its_gate():
    table = phase_table((APERTURE,))
    pool = jax.jit(jax.vmap(lambda key: draw_sequence(key, 0, table)))(jax.random.split(jax.random.key(3), 64))
    on = gates_on(pool.position, pool.velocity, pool.kind)
    local = np.asarray(on.local(pool.position))
    steps = np.arange(local.shape[1]) < np.asarray(pool.length)[:, None]
    np.testing.assert_allclose(local[steps][:, 1:], 0, atol=2e-3)
    assert (local[:, 0, 0] < -0.6).all() and (local[np.arange(64), pool.length - 1, 0] > 0.4).all()
    middle = np.abs(local[..., 0]).argmin(axis=1)
    speed = np.asarray(pool.speed)[np.arange(64), middle]
    assert ((speed > 0.27) & (speed < 0.35)).all() and (np.asarray(pool.length) < 500).all()


# --- robustness


def test_traced_strengths_are_computed_and_plain_zeros_are_not():
    assert not active(0.0) and not active(0) and active(0.1) and active(1) and active(jnp.float32(0.0))
    with pytest.raises(ValueError, match="only 0 and 1"):
        Disturbance(latency=2)


def test_the_cases_are_the_documented_ones():
    assert list(CASES) == ["nominal", "mass", "force", "action noise", "latency", "observation noise", "all together"]
    assert CASES["all together"] == Disturbance(mass=0.12, force=0.1, action_noise=0.02, observation_noise=0.01, latency=1)
    for name, case in CASES.items():
        changed = [field for field, value in vars(case).items() if value]
        assert len(changed) == {"nominal": 0, "all together": 5}.get(name, 1)


def test_one_program_gives_what_an_examiner_of_its_own_gives():
    "The shared program under traced strengths against one compiled for these strengths alone; the same flights."
    shared = DisturbedExaminer(4, physics=Physics.so_rpy)
    own = Examiner(4, physics=Physics.so_rpy, disturbance=CASES["all together"])
    shared.learner = own.learner = HandPilot()
    seeds = (101, 102, 103, 104)
    a = shared.fly(None, "curve_tracking", seeds, disturbance=CASES["all together"])
    b = own.fly(None, "curve_tracking", seeds)
    np.testing.assert_allclose(a.position, b.position, atol=2e-3)
    rows = robustness(None, "curve_tracking", seeds, examiner=shared)
    assert [row["case"] for row in rows] == list(CASES) and shared._under._cache_size() == 1
    error = {row["case"]: row["position_error"] for row in rows}
    assert error["mass"] > error["nominal"] and error["all together"] > error["nominal"]
    assert a.finite and a.seeds == seeds
