"""The racing planner: its geometry against brute force, its references against the style, its plans against what can go wrong."""
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import rlnb.race  # noqa: F401  first: it sets the flag that crazyflow wants before Brax imports SciPy
from rlnb.race.contacts import clearance
from rlnb.race.courses import draw_courses
from rlnb.race.crossings import candidates, choose_lines, joining, pole_sides, route
from rlnb.race.levels import GATES, load_level
from rlnb.race.paths import Motion, PlanError, plan
from rlnb.race.racing import Headings, RacingPlanner, Tapes, rehearse
from rlnb.race.scenes import Scene
from rlnb.race.smoothing import Path, banded_product, obstacle_pushes, pole_pushes, rooms, smooth, stiffness
from rlnb.race.speeds import curvatures, profile, timed
from rlnb.race.styles import STYLES, Style
from rlnb.race.world import Sensed
from rlnb.tracker.commands import DT
from rlnb.tracker.dynamics import Body, quaternion, rotation

WORLDS = 8
STILL = np.zeros(3)


@pytest.fixture(scope="module")
def course():
    return draw_courses(load_level(3), range(5100, 5100 + WORLDS))


@pytest.fixture(scope="module")
def flown(course):
    planner = RacingPlanner("fast")
    return planner, rehearse(planner, course, 900)


def sensed(course, worlds):
    "What drones at rest at the start report when they know all true poses."
    n, names = len(worlds), ("start_position", "gate_position", "gate_rotation", "pole")
    part = {name: np.array(getattr(course, name))[worlds] for name in names}
    start = part.pop("start_position")
    zero, yes = np.zeros((n, 3), np.float32), np.ones((n, GATES), bool)
    body = Body(start, np.tile(np.float32([0, 0, 0, 1]), (n, 1)), zero, zero)
    count = np.zeros(n, np.int32)
    return Sensed(body, **part, gate_seen=yes, pole_seen=yes, target=count, step=count, alive=np.ones(n, bool))


# ---- references of whole races


def test_every_gate_is_crossed_in_its_direction_inside_the_opening(course, flown):
    "Computed here, from the references alone."
    _, rehearsal = flown
    assert (rehearsal.finish_step > 0).all()
    for world in range(WORLDS):
        scene, steps = Scene.true(course, world), []
        for gate in range(GATES):
            local = scene.local(gate, rehearsal.position[: rehearsal.finish_step[world], world])
            first = steps[-1] if steps else 0
            ways = [k for k, (a, b) in enumerate(pairwise(local)) if k >= first and a[0] < 0 <= b[0] and np.abs(a[1:]).max() < 0.2]
            assert ways, f"gate {gate} of world {world} is not crossed after step {first}"
            assert np.abs(local[ways[0]][1:]).max() < 0.13, "less than the drone's half width to the frame"
            steps.append(ways[0])


def test_references_are_continuous_and_within_the_style(flown):
    planner, rehearsal = flown
    style, flying = planner.style, (rehearsal.target < GATES)[1:]
    move = np.linalg.norm(np.diff(rehearsal.position, axis=0), axis=-1)
    assert move[flying].max() <= 1.1 * style.speed * DT
    assert np.percentile(move[flying], 90) > 0.5 * style.speed * DT  # and it makes use of it
    np.testing.assert_allclose(rehearsal.position[2:] - rehearsal.position[:-2], 2 * DT * rehearsal.velocity[1:-1], atol=1e-5)
    push = np.linalg.norm(np.diff(rehearsal.velocity, axis=0), axis=-1)[flying] / DT
    assert np.percentile(push, 99) <= 1.1 * np.hypot(style.lateral, style.along)
    assert push.max() <= 2.0 * np.hypot(style.lateral, style.along)  # where a plan begins with a speed that is too high for it


def test_headings_are_within_reach_of_the_attitude_command(flown):
    _, rehearsal = flown
    assert np.abs(rehearsal.heading).max() <= np.deg2rad(80)
    assert np.abs(np.diff(rehearsal.heading, axis=0)).max() <= Headings.FASTEST * DT * 1.001


def test_nothing_is_touched_by_a_drone_that_flies_the_references(course, flown):
    _, rehearsal = flown
    least = np.full(WORLDS, np.inf)
    for step in range(40, len(rehearsal.position)):
        heading = rehearsal.heading[step]
        level = rotation(quaternion(np.stack([0 * heading, 0 * heading, heading], -1)))
        gap = np.min([np.asarray(g).min(-1) for g in clearance(course, rehearsal.position[step], level).values()], axis=0)
        least = np.minimum(least, np.where(rehearsal.target[step] < GATES, gap, np.inf))
    assert least.min() > 0.005 and np.median(least) > 0.03


def test_the_same_races_whatever_flies_beside_them(course, flown):
    "Deterministic, and worlds do not know each other."
    _, rehearsal = flown
    pair = [5, 2]
    again = rehearse(RacingPlanner("fast"), draw_courses(load_level(3), [5100 + w for w in pair]), 900)
    steps = min(len(again.position), len(rehearsal.position))
    np.testing.assert_array_equal(again.position[:steps], rehearsal.position[:steps, pair])
    np.testing.assert_array_equal(again.finish_step, rehearsal.finish_step[pair])


def test_who_plans_is_on_record(course, flown):
    planner, rehearsal = flown
    starts = [event for event in planner.events if event[2] == "start"]
    assert starts == [(world, 0, "start") for world in range(WORLDS)]
    assert {what for _, _, what in planner.events} == {"start", "seen"}  # who flies what he is told misses nothing
    assert 3 * WORLDS < len(planner.events) < 15 * WORLDS
    assert set(np.unique(rehearsal.phase)) <= set(range(len(planner.phases))) and (rehearsal.phase[0] == 0).all()
    crossing = [rehearsal.phase[np.argmax(rehearsal.target[:, w] == 1) - 1, w] for w in range(WORLDS)]
    assert crossing == [planner.phases.index("cross")] * WORLDS


# ---- planning again


def obey(planner, report, steps):
    "The commands of some steps to drones that are where they are told to be, and the report after them."
    commands = []
    for _ in range(steps):
        commands.append(planner.command(report))
        report = report.replace(body=report.body.replace(position=commands[-1].current, velocity=commands[-1].velocity))
    return commands, report


def started(course, worlds, steps):
    "A planner that has flown `steps` with exact drones on true poses, and what it is told next."
    planner = RacingPlanner("steady")
    planner.reset(len(worlds))
    return planner, obey(planner, sensed(course, worlds), steps)[1]


def test_a_new_plan_leaves_what_is_committed_unchanged(course):
    planner, report = started(course, [1], 60)
    other = deepcopy(planner)
    moved = report.replace(gate_position=report.gate_position + np.float32([0.0, 0.1, 0.05]))
    reach, now = planner.tapes.reach, planner.step
    held, new = obey(planner, report, 28)[0], obey(other, moved, 28)[0]  # until the gate
    assert other.events[-1] == (0, now, "seen") and len(planner.events) + 1 == len(other.events)
    np.testing.assert_array_equal(held[0].current, new[0].current)
    np.testing.assert_array_equal(held[0].velocity, new[0].velocity)
    begin = now + reach + 1  # the new plan starts on the old one there, but for the rounding of its solver
    np.testing.assert_array_equal(planner.tapes.point[0, :begin], other.tapes.point[0, :begin])
    np.testing.assert_allclose(planner.tapes.point[0, begin], other.tapes.point[0, begin], rtol=0, atol=1e-9)
    gap = [np.linalg.norm(a.current - b.current) for a, b in zip(held, new)]
    assert max(gap) > 0.02 and np.diff(gap).max() < 0.02  # it goes elsewhere, bit by bit


def test_a_missed_gate_is_planned_for_afresh(course):
    "The drone flies past: the planner is never told of a gate that was passed."
    planner, report = started(course, [1], 1)
    while planner.step < planner.due[0, 0] + planner.style.late + 5:
        due = planner.due[0, 0]
        command = planner.command(report)
        report = report.replace(body=report.body.replace(position=command.current, velocity=command.velocity))
        if planner.events[-1][2] == "missed":
            break
    _, step, what = planner.events[-1]
    assert what == "missed" and due + planner.style.late < step < due + planner.style.late + 2
    assert planner.due[0, 0] > step + 10  # back to the front of it
    np.testing.assert_allclose(planner.paths[0].point[0], report.body.position[0], atol=2 * planner.style.speed * DT)


def test_a_drone_that_is_lost_is_fetched_where_it_is(course):
    planner, report = started(course, [1], 50)
    away = report.body.position + np.float32([0.3, 0.3, 0.0])
    command = planner.command(report.replace(body=report.body.replace(position=away)))
    assert planner.events[-1][2] == "strayed"
    np.testing.assert_allclose(command.current, away, atol=0.01)


def test_a_race_that_is_over_is_left_alone(course):
    planner, report = started(course, [1, 2], 50)
    many, gone = len(planner.events), report.replace(alive=np.array([False, False]), gate_position=report.gate_position + 0.3)
    planner.command(gone)
    planner.command(gone.replace(target=np.full(2, GATES, np.int32)))
    assert len(planner.events) == many
    assert planner.phase.tolist() == [3, 3]


# ---- starts that are impossible, poses that are none


@pytest.mark.parametrize("where", ["inside a pole", "inside a stand", "inside the frame", "on top of the gate", "at the wall"])
def test_an_impossible_start_is_still_planned(course, where):
    scene, style = Scene.true(course, 0), Style()
    floor, up = np.array([1, 1, 0]), np.array([0, 0, 0.02])
    start = {"inside a pole": scene.pole[0] * floor + up, "inside a stand": scene.gate[0] * floor + up,
             "inside the frame": scene.gate[0] + 0.28 * scene.turn[0][:, 1], "on top of the gate": scene.gate[0] + [0, 0, 0.36],
             "at the wall": np.array([-2.45, 1.45, 0.01])}[where]
    path = plan(scene, 0, Motion(start, STILL, takeoff=start[2] < 0.1), style)
    assert np.isfinite(path.point).all() and len(path.crossing) == GATES
    np.testing.assert_allclose(path.point[0], start)
    assert rooms(path, scene, style)[path.crossing[0] : path.crossing[-1]].min() > 0.0


@pytest.mark.parametrize("name, words", [
    ("gate_position", "a gate's pose"), ("gate_rotation", "a gate's pose"), ("pole", "a pole's place")])
def test_one_world_without_a_plan_does_not_stop_the_others(course, name, words):
    planner, report = RacingPlanner(), sensed(course, [0, 1])
    broken = np.array(getattr(report, name))
    broken[0, 2] = np.nan
    planner.reset(2)
    command = planner.command(report.replace(**{name: broken}))
    assert planner.events == [(0, 0, f"no plan: {words} is not finite"), (1, 0, "start")]
    for _ in range(30):
        command = planner.command(report.replace(**{name: broken}))
    np.testing.assert_allclose(command.current[0], report.body.position[0], atol=1e-6)  # it waits
    assert np.linalg.norm(command.current[1] - report.body.position[1]) > 0.1
    assert [event[0] for event in planner.events[2:]].count(0) == 2  # and tries again, every quarter of a second
    for _ in range(40):
        command = planner.command(report)
    assert (0, "missed") in [(world, what) for world, _, what in planner.events]
    assert np.linalg.norm(command.current[0] - report.body.position[0]) > 0.02


def test_errors_of_the_caller(course):
    scene = Scene.true(course, 0)
    with pytest.raises(PlanError, match="no gate 4"):
        plan(scene, 4, Motion(STILL, STILL), Style())
    with pytest.raises(PlanError, match="drone's motion is not finite"):
        plan(scene, 0, Motion(STILL, STILL * np.nan), Style())
    with pytest.raises(ValueError, match="no style 'furious'; there are steady"):
        RacingPlanner("furious")
    planner = RacingPlanner(steps=3)
    planner.reset(3)
    with pytest.raises(ValueError, match=r"2 drones report, but reset\(\) was told of 3"):
        planner.command(sensed(course, [0, 1]))
    planner.reset(1)
    for _ in range(4):  # the last one is for the state in which the race ends
        planner.command(sensed(course, [0]))
    with pytest.raises(ValueError, match="over after 3 steps"):
        planner.command(sensed(course, [0]))


@pytest.mark.parametrize("figures, words", [
    ({"lateral": -1.0}, "lateral is -1.0"), ({"smooth": 6}, "odd"), ({"speed": float("nan")}, "speed is nan")])
def test_figures_that_make_no_sense(figures, words):
    with pytest.raises(ValueError, match=words):
        replace(STYLES["steady"], **figures)


# ---- the parts


def test_lines_are_the_cheapest_of_all_pairs(course):
    "Dynamic programming against every combination of lines through the last two gates."
    scene, style, position = Scene.true(course, 3), Style(), np.array([0.2, -0.1, 1.0])
    (first, price), (second, last) = (candidates(scene, gate, style) for gate in (2, 3))
    start, end = (first.centre + sign * style.approach * first.direction for sign in (-1, 1))
    total = (joining(position[None], np.zeros((1, 3)), start, first.direction)[0] + price)[:, None] + (
        joining(end, first.direction, second.centre - style.approach * second.direction, second.direction) + last[None])
    i, j = np.unravel_index(total.argmin(), total.shape)
    options = choose_lines(scene, 2, position, STILL, style)
    np.testing.assert_array_equal(options[0].centre, [first.centre[i], second.centre[j]])
    np.testing.assert_array_equal(options[0].direction, [first.direction[i], second.direction[j]])
    sides = [tuple(pole_sides(scene, 2, type(first)(o.centre[:1], o.direction[:1]))[0]) for o in options]
    assert len(set(sides)) == len(sides) <= style.options


def test_a_route_keeps_its_lines_whole(course):
    style = Style()
    for world in range(WORLDS):
        scene, start = Scene.true(course, world), np.asarray(course.start_position[world], float)
        lines = choose_lines(scene, 0, start, STILL, style)[0]
        corner, crossing = route(scene, 0, lines, start, style)
        np.testing.assert_array_equal(corner[crossing], lines.centre)
        for off in (-1, 1):
            np.testing.assert_allclose(corner[crossing + off], lines.centre + off * style.approach * lines.direction)


def test_the_band_is_the_gradient_of_the_energy():
    rng, h = np.random.default_rng(2), 0.06
    point, bend = rng.normal(size=(12, 3)), rng.uniform(0.05, 0.3, 10)

    def energy(p):
        return 0.5 * (np.diff(p, axis=0) ** 2).sum() / h + 0.5 * (bend[:, None] * np.diff(p, 2, axis=0) ** 2).sum() / h**3

    gradient = banded_product(stiffness(12, bend, h), point)
    for k, axis in ((0, 0), (1, 2), (6, 1), (10, 0), (11, 2)):
        step = np.zeros_like(point)
        step[k, axis] = 1e-5
        np.testing.assert_allclose((energy(point + step) - energy(point - step)) / 2e-5, gradient[k, axis], rtol=1e-6)


def test_a_push_ends_where_there_is_room(course):
    scene, style = Scene.true(course, 0), Style()
    point = scene.pole[:1] * [1, 1, 0] + [0.05, -0.03, 0.6]
    push = pole_pushes(point, scene, style)
    assert push.index.tolist() == [0]
    moved = point + push.normal * push.depth[:, None]
    assert pole_pushes(moved, scene, style).depth.max(initial=0) < 1e-9
    high = point * [1, 1, 0] + [0, 0, 1.9]
    assert not len(pole_pushes(high, scene, style).index)


def test_smoothing_moves_a_path_out_of_the_way_and_keeps_its_beginning(course):
    scene, style = Scene.true(course, 0), Style()
    far = scene.gate + np.array([0, 0, 50])
    post = Scene(far, scene.turn, np.array([[0.0, 0.02, 1.55], *[[50.0, k, 1.55] for k in range(3)]]))
    straight = Path(np.linspace([-1.2, 0, 1], [1.2, 0, 1], 41), np.array([], int), target=GATES, fixed=3)
    curved = smooth(straight, post, style)
    np.testing.assert_allclose(curved.point[:3], straight.point[:3], atol=1e-8)
    assert np.linalg.norm(straight.point[:, :2] - [0, 0.02], axis=1).min() < 0.05
    assert np.linalg.norm(curved.point[:, :2] - [0, 0.02], axis=1).min() > style.clear_pole - 0.02
    assert obstacle_pushes(curved, post, style).depth.max(initial=0) < 0.02


@pytest.mark.parametrize("seed", range(4))
def test_speeds_keep_to_the_friction_circle(seed):
    "Random wavy lines; the second half of them is entered too fast."
    rng, style = np.random.default_rng(seed), Style(speed=2.5, lateral=4.0, along=3.0)
    s = np.linspace(0, 6, 120)
    point = np.stack([s, 0.3 * np.sin(2 * s + rng.uniform(0, 6)) + 0.1 * np.sin(5 * s), 1 + 0.2 * np.sin(s)], -1)
    start = 0.0 if seed < 2 else 3.5
    cap = np.where(np.arange(120) > 80, 1.0, np.inf)
    speed, way, curvature = profile(point, start, style, cap)
    assert speed[0] == start
    settled = np.arange(120) > (0 if start == 0 else 60)
    assert (speed <= np.minimum(style.speed, cap) + 1e-9)[settled].all()
    across = speed**2 * curvature / style.lateral
    assert across[settled].max() <= 1 + 1e-9
    along = np.diff(speed**2) / 2 / np.diff(way)
    assert along.max() <= style.along * (1 + 1e-9) and along.min() >= -1.5 * style.along * (1 + 1e-9)
    np.testing.assert_allclose(curvatures(point)[1], curvature)
    reference, time = timed(point, profile(point, start, style, cap))
    mean = np.diff(way) / np.diff(time)
    np.testing.assert_allclose(mean, (speed[1:] + speed[:-1]) / 2, rtol=1e-6)
    assert np.linalg.norm(np.diff(reference, axis=0), axis=1).max() <= max(speed) * DT * 1.01


def test_tapes_end_where_they_end():
    tape = Tapes(np.ones((2, 3)), 20, width=3)
    tape.write(1, 10, np.arange(30)[:, None] * np.ones(3))
    np.testing.assert_array_equal(tape.read([0, 500])[0], np.ones((2, 3)))
    np.testing.assert_allclose(tape.point[1, -1], 9)
    assert tape.read([-5])[1, 0, 0] == 1 and tape.read([19])[1, 0, 0] <= 9
