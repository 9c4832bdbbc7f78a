"""The slow planner without a simulator: a drone that follows its reference perfectly, or does not."""
import numpy as np
import pytest

from rlnb.race.courses import draw_courses
from rlnb.race.flights import COURSE, order
from rlnb.race.levels import GATES, load_level
from rlnb.race.slow import (ALIGN, CROSS, FRAME, HALF, OPENING, RECOVER, SPACING, GeometricSlowGatePlanner, Obstacles, SlowStyle,
                            crossing_line, lay_rail, route, smooth)
from rlnb.race.world import Sensed
from rlnb.tracker.commands import DT
from rlnb.tracker.dynamics import Body


class Perfect:
    "Drones that are where the reference is, plus an `offset` (3,) m, on drawn courses; gates are counted by the sign of x in their frames."

    def __init__(self, seeds, offset=(0, 0, 0)):
        course = draw_courses(load_level(3), list(seeds))
        self.course = {name: np.asarray(getattr(course, name)) for name in (*COURSE, "start_position")}
        self.n, self.offset = len(seeds), np.array(offset)
        self.position = self.course["start_position"].astype(float)
        self.target, self.step = np.zeros(self.n, int), 0
        self.gate_seen, self.pole_seen = (np.zeros((self.n, 4), bool) for _ in range(2))

    def sense(self) -> Sensed:
        c, p = self.course, self.position
        for seen, things in ((self.gate_seen, c["gate_position"]), (self.pole_seen, c["pole"])):
            seen |= np.linalg.norm(things[..., :2] - p[:, None, :2], axis=-1) < 0.7
        still, known = np.zeros((self.n, 3)), {}
        for name in ("gate_position", "gate_rotation", "pole"):
            seen = self.pole_seen if name == "pole" else self.gate_seen
            known[name] = np.where(seen.reshape(*seen.shape, *[1] * (c[name].ndim - 2)), c[name], c[f"nominal_{name}"])
        return Sensed(Body(p, np.tile([0.0, 0, 0, 1], (self.n, 1)), still, still), **known, gate_seen=self.gate_seen,
                      pole_seen=self.pole_seen, target=self.target.copy(), step=np.full(self.n, self.step), alive=self.target < GATES)

    def move(self, command):
        before, self.position = self.position, np.asarray(command.current, float) + self.offset
        worlds, gate = np.arange(self.n), np.minimum(self.target, GATES - 1)
        turn, centre = self.course["gate_rotation"][worlds, gate], self.course["gate_position"][worlds, gate]
        here, there = (np.einsum("wij,wi->wj", turn, p - centre) for p in (before, self.position))
        through = (here[:, 0] < 0) & (there[:, 0] > 0) & (np.abs(there[:, 1:]) < OPENING).all(axis=1)
        self.target = self.target + (through & (self.target < GATES))
        self.step += 1


def flown(seeds, steps=1400, offset=(0, 0, 0), style=None):
    "Commands, phases and targets (steps, worlds, ...) of perfect drones."
    drones, planner = Perfect(seeds, offset), GeometricSlowGatePlanner(style)
    planner.reset(drones.n)
    rows = []
    for _ in range(steps):
        command = planner.command(drones.sense())
        rows.append((command, planner.phase.copy(), drones.target.copy()))
        if (drones.target == GATES).all():
            break
        drones.move(command)
    return rows, drones, planner


@pytest.fixture(scope="module")
def races():
    return flown(range(5010, 5014))


def test_every_course_is_finished_when_the_drone_follows(races):
    rows, drones, _ = races
    assert (drones.target == GATES).all() and len(rows) * DT < 28


def test_references_are_continuous_and_what_was_shown_ahead_comes_true(races):
    rows, *_ = races
    current, following, ahead = (np.array([getattr(command, name) for command, *_ in rows]) for name in ("current", "next", "lookahead"))
    style = SlowStyle()
    assert np.linalg.norm(np.diff(current, axis=0), axis=-1).max() < 1.2 * style.cruise * DT
    # A perfect drone leaves no height error, so the trim only follows the reference by one step.
    assert np.abs(following[:-5] - current[5:]).max() < 0.02 and np.abs(ahead[:-10] - current[10:]).max() < 0.02
    velocity = np.array([command.velocity for command, *_ in rows])
    assert np.abs(velocity[1:-1] - (current[2:] - current[:-2]) / (2 * DT)).max() < 0.05


def test_recover_begins_with_a_gate_and_only_with_one(races):
    rows, *_ = races
    phase, target = np.array([p for _, p, _ in rows]), np.array([t for *_, t in rows])
    entered = (phase[1:] == RECOVER) & (phase[:-1] != RECOVER)
    counted = np.diff(target, axis=0) > 0
    assert (counted | ~entered).all() and (entered | ~counted | (target[1:] == GATES)).all() and entered.sum() >= 3 * 4


def test_the_gate_is_crossed_slowly_and_from_the_right_side(races):
    rows, drones, _ = races
    target = np.array([t for *_, t in rows])
    speed = np.array([np.linalg.norm(command.velocity, axis=-1) for command, *_ in rows])
    step, world = np.nonzero(np.diff(target, axis=0) > 0)
    assert len(step) == 4 * drones.n and speed[step, world].max() < SlowStyle().cross + 0.02
    velocity = np.array([rows[k][0].velocity[w] for k, w in zip(step, world)])
    assert (np.einsum("ni,ni->n", velocity, drones.course["gate_rotation"][world, target[step, world]][:, :, 0]) > 0).all()


def test_a_drone_beside_the_line_waits_until_the_tolerance_has_grown():
    waited = []
    for aside in (0.0, 0.07):
        drones, planner = Perfect([5010]), GeometricSlowGatePlanner()
        planner.reset(1)
        for _ in range(800):
            before = int(planner.waited[0])
            drones.move(planner.command(drones.sense()))
            drones.offset = aside * np.array([-planner.direction[0, 1], planner.direction[0, 0], 0])
            if planner.phase[0] == CROSS:
                break
        waited.append(before * DT)
    style = SlowStyle()
    assert waited[0] < style.patience and waited[1] == pytest.approx(style.patience + 0.07 / style.settled - 1, abs=0.15)


def test_a_drone_that_strays_before_the_plane_backs_out():
    drones, planner = Perfect([5010]), GeometricSlowGatePlanner()
    planner.reset(1)
    for _ in range(800):
        command = planner.command(drones.sense())
        drones.move(command)
        along, _ = planner._off_line(drones.position)
        if planner.phase[0] == CROSS and -0.25 < along[0] < -0.1:
            drones.offset = np.array([0, 0, 0.15])
            before = planner.at[0]
            for _ in range(40):
                command = planner.command(drones.sense())
                drones.move(command)
            assert planner.phase[0] == ALIGN and planner.at[0] < before and any(what == "backed out" for *_, what in planner.events)
            return
    raise AssertionError("it never crossed")


def test_two_runs_are_the_same_and_a_world_does_not_depend_on_its_neighbours():
    rows, again, alone = flown([5020, 5021], 200)[0], flown([5020, 5021], 200)[0], flown([5021], 200)[0]
    one, two, three = (np.array([command.current for command, *_ in r]) for r in (rows, again, alone))
    assert np.array_equal(one, two) and np.array_equal(one[:, 1], three[:, 0])


def test_lines_leave_room_for_poles_and_keep_to_the_opening():
    far = Obstacles(np.array([[2.0, 1.0]]), np.array([[0.0, 1.0]]), np.array([[-2.0, -1.0]]))
    line = crossing_line(np.array([0, 0, 0.7]), np.eye(3), far, SlowStyle())
    assert np.allclose(line.point, [0, 0, 0.7]) and np.allclose(line.direction, [1, 0, 0]) and line.room == pytest.approx(0.1)
    for pole in ([0.25, 0.0], [-0.3, 0.05], [-0.2, -0.08]):
        around = Obstacles(far.gate, far.along, np.array([pole]))
        line = crossing_line(np.array([0, 0, 0.7]), np.eye(3), around, SlowStyle())
        off = np.array(pole) - line.point[:2]
        assert abs(off[0] * line.direction[1] - off[1] * line.direction[0]) > HALF + 0.015 + 0.03
        assert abs(line.point[1]) + HALF / line.direction[0] < OPENING - 0.02 and line.room > 0.02


def test_routes_go_around_a_wall_and_not_through_it():
    wall = Obstacles(np.array([[0.0, 0.0]]), np.array([[0.0, 1.0]]), np.array([[0.0, 0.6]]))
    way = route(np.array([0.5, 0.1]), np.array([-0.8, 0.1]), wall, SlowStyle())
    assert np.allclose(way[[0, -1]], [[0.5, 0.1], [-0.8, 0.1]]) and wall.clearance(way).min() > 0.2
    crossed = np.abs(np.interp(0, way[::-1, 0], way[::-1, 1]))
    assert crossed > FRAME + 0.2
    clear = route(np.array([0.5, 0.9]), np.array([1.5, 0.9]), wall, SlowStyle())
    assert np.abs(clear[:, 1] - 0.9).max() < 1e-9  # nothing in the way: straight


def test_rails_keep_their_ends_and_can_always_slow_down():
    lead = np.array([[1.0, 0.3, 0.7], [1.1, 0.3, 0.7]])
    wall = Obstacles(np.array([[0.0, 0.0]]), np.array([[0.0, 1.0]]), np.array([[1.5, -1.0]]))
    others = Obstacles(np.array([[2.0, 1.0]]), np.array([[0.0, 1.0]]), wall.pole)
    line = crossing_line(np.array([0, 0, 1.2]), np.eye(3), others, SlowStyle())
    rail = lay_rail(lead, line, wall, SlowStyle())
    assert np.allclose(rail.points[0], lead[0]) and np.allclose(rail.points[-1], line.point + line.end * line.direction)
    assert -np.diff(rail.limit**2).min() <= 2 * SlowStyle().acceleration * SPACING + 1e-9 and rail.limit.min() > 0
    at = rail.points[round(rail.gate / SPACING)]
    assert abs(at[0]) < 0.021 and np.allclose(at[1:], line.point[1:], atol=0.01)
    kinked = np.array([[0.0, 0, 0], [1, 0, 0], [1, 1, 0]])
    fine = np.concatenate([np.linspace(kinked[i], kinked[i + 1], 51)[:-1] for i in range(2)] + [kinked[-1:]])
    bend = np.linalg.norm(np.gradient(np.gradient(smooth(fine), SPACING, axis=0), SPACING, axis=0), axis=-1)
    assert bend.max() < 6  # 1/m: a radius of 17 cm instead of a corner


def test_commands_have_the_shapes_that_pilots_are_shown():
    command = order(*np.zeros((3, 2, 3)), np.array([[3.0, 4, 0], [0, 0, 0]]), heading=np.array([0.1, 0.2]))
    assert command.speed.tolist() == [5, 0] and command.kind.shape == command.brake.shape == command.rolling.shape == (2,)
    assert command.heading.dtype == np.float32
