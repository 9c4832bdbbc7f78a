"""Traces: written, read, replayed, and judged."""
from dataclasses import fields, replace

import numpy as np
import pytest

from rlnb.race.flights import (RaceFlights, fly, load_pilot, load_races, order, race_figures, reference_jump, replay, save_races,
                               smoke_metrics, success, taxonomy)
from rlnb.race.levels import LEVEL3_SHA256, load_level
from rlnb.race.traces import crossings, endings, false_recoveries, trace_figures
from rlnb.race.world import Outcome, RaceWorld
from rlnb.tracker.commands import DT


def made(worlds: int = 4, steps: int = 60, **changed) -> RaceFlights:
    "Flights along x at 1 m/s, 1 m up, through four gates .25 m apart, that nobody had to simulate."
    time = np.arange(steps) * DT
    position = np.zeros((steps, worlds, 3), np.float32)
    position[..., 0], position[..., 2] = time[:, None], 1
    velocity = np.broadcast_to(np.float32([1, 0, 0]), position.shape)
    gate = np.array([[0.305 + 0.25 * g, 0, 1] for g in range(4)], np.float32)
    target = np.broadcast_to((position[:, 0, :1] > gate[:, 0]).sum(axis=1)[:, None], (steps, worlds)).astype(np.int8)
    poses = {"gate_position": np.broadcast_to(gate, (worlds, 4, 3)),
             "gate_rotation": np.broadcast_to(np.eye(3, dtype=np.float32), (worlds, 4, 3, 3)), "pole": np.zeros((worlds, 4, 3), np.float32)}
    flat = np.zeros((steps, worlds))
    values = poses | {f"nominal_{name}": value for name, value in poses.items()} | {
        "position": position, "quaternion": np.broadcast_to(np.float32([0, 0, 0, 1]), (steps, worlds, 4)), "velocity": velocity,
        "action": np.zeros((steps, worlds, 4), np.float32), "reference": position, "desired_velocity": velocity, "heading": flat,
        "phase": flat.astype(np.int8), "target": target, "alive": flat == 0, "gate_seen": np.ones((steps, worlds, 4), bool),
        "pole_seen": np.ones((steps, worlds, 4), bool), "seeds": np.arange(worlds), "outcome": np.full(worlds, Outcome.flying, np.int8),
        "hit": np.full(worlds, -1, np.int8), "finish_step": np.full(worlds, -1), "infeasible": np.zeros(worlds, np.int8),
        "event_world": np.zeros(0, int), "event_step": np.zeros(0, int), "event_what": np.zeros(0, "U1"),
        "phases": np.array(["cruise", "slowdown", "align", "cross", "recover"]), "planner": "made",
        "level": "level3.toml", "level_sha256": LEVEL3_SHA256}
    return RaceFlights(**(values | changed))


def test_success_counts_feasible_races_and_names_the_others():
    outcome = np.int8([Outcome.finished, Outcome.finished, Outcome.pole, Outcome.stand])
    flights = made(outcome=outcome, finish_step=np.array([50, 40, 30, 1]), infeasible=np.int8([0, 0, 0, Outcome.stand]))
    assert taxonomy(flights) == {"finished": 2, "pole": 1, "infeasible": 1} and sum(taxonomy(flights).values()) == len(flights.seeds)
    rate, figures = success(flights), race_figures(flights)
    assert rate.value == pytest.approx(2 / 3) and rate.low < 2 / 3 < rate.high
    assert figures["feasible"] == 3 and figures["success_rate_all"] == 0.5
    assert figures["mean_time"] == pytest.approx(0.9) and figures["best_time"] == pytest.approx(0.8)
    assert np.isnan(flights.time[2:]).all() and endings(flights) == {("pole", "cruise"): 1}


def test_nobody_finished_is_no_time_at_all():
    figures = race_figures(made())
    assert figures["finished"] == 0 and np.isnan(figures["mean_time"]) and np.isnan(figures["best_time"])


def test_progress_early_ends_and_the_hash_decide_the_smoke():
    good = smoke_metrics(made())
    assert good["first_gate_progress_rate"] == 1 and good["gate0_passes"] == 4 and good["early_termination_rate"] == 0
    assert good["config_hash_clean"] is True and good["finite"] is True and good["episodes"] == 4
    still = made()
    still = replace(still, position=np.zeros_like(still.position), target=np.zeros_like(still.target), level_sha256="0" * 64,
                    outcome=np.int8([Outcome.pole] * 3 + [Outcome.flying]), finish_step=np.array([49, 50, 10, -1]))
    bad = smoke_metrics(still)
    assert bad["first_gate_progress_rate"] == 0 and bad["gate0_passes"] == 0 and bad["early_termination_rate"] == 0.5
    assert bad["config_hash_clean"] is False
    broken = made()
    action = broken.action.copy()
    action[3, 1, 2] = np.nan
    assert smoke_metrics(replace(broken, action=action))["finite"] is False


def test_crossings_are_where_the_gates_are():
    found = crossings(made())
    assert len(found.gate) == 16 and np.bincount(found.gate).tolist() == [4, 4, 4, 4]
    assert np.allclose(found.offset, 0, atol=1e-6) and np.allclose(found.speed, 1) and np.allclose(found.commanded_speed, 1)
    aside = made()
    position = aside.position + np.float32([0, 0.1, -0.05])
    assert np.allclose(crossings(replace(aside, position=position)).offset, [0.1, -0.05], atol=1e-5)


def test_recoveries_need_a_gate_that_was_counted():
    flights = made()
    phase = np.zeros_like(flights.phase)
    step = int(np.argmax(flights.target[:, 0] > 0))
    phase[step:step + 5] = 4
    assert false_recoveries(replace(flights, phase=phase)) == 0
    phase[:] = 0
    phase[step + 3:step + 5, 1] = 4
    assert false_recoveries(replace(flights, phase=phase)) == 1


def test_alignments_and_back_outs_are_counted_with_their_times():
    flights = made()
    phase = np.zeros_like(flights.phase)
    phase[10:20, 0], phase[20:25, 0], phase[25:40, 0], phase[40:, 0] = 2, 3, 2, 3
    figures = trace_figures(replace(flights, phase=phase))
    assert figures["alignments"] == 2 and figures["back_outs"] == 1 and figures["align_time"] == pytest.approx(12.5 * DT)


def test_jumps_of_the_reference_are_seen_while_the_drone_flies():
    flights = made()
    reference = flights.reference.copy()
    reference[30:, 2] += np.float32([0, 0, 0.4])
    assert reference_jump(replace(flights, reference=reference)) == pytest.approx(np.hypot(0.4, 0.02), abs=1e-4)
    alive = flights.alive.copy()
    alive[25:, 2] = False
    assert reference_jump(replace(flights, reference=reference, alive=alive)) == pytest.approx(0.02, abs=1e-4)


def test_a_trace_survives_its_file_and_a_foreign_one_is_named(tmp_path):
    flights = made(event_world=np.array([1]), event_step=np.array([7]), event_what=np.array(["missed"]))
    again = load_races(save_races(tmp_path / "races.npz", flights))
    assert all(np.array_equal(getattr(again, f.name), getattr(flights, f.name)) for f in fields(flights)) and again.planner == "made"
    np.savez(tmp_path / "other.npz", position=np.zeros(3))
    with pytest.raises(ValueError, match=r"other\.npz is no trace of races"):
        load_races(tmp_path / "other.npz")


class Rise:
    "A planner for tests: half a metre a second upwards."

    name, phases = "rise", ("rise",)

    def reset(self, worlds):
        self.begin, self.phase, self.events = None, np.zeros(worlds, int), []

    def command(self, sensed):
        self.begin = sensed.body.position if self.begin is None else self.begin
        points = [self.begin + [[0, 0, 0.5 * DT * (step + ahead)] for step in sensed.step] for ahead in (0, 5, 10)]
        return order(*points, np.tile([0, 0, 0.5], (len(points[0]), 1)))


def test_what_was_recorded_can_be_flown_again_and_is_no_mere_copy():
    world = RaceWorld(load_level(3), 2)
    flights = fly(world, Rise(), *load_pilot("pd"), seeds=[5006, 5007], steps=40)
    assert flights.position.shape == (41, 2, 3) and flights.alive.all() and flights.position[-1, :, 2].min() > 0.1
    assert replay(world, flights) == 0
    assert replay(world, replace(flights, outcome=flights.outcome + 1)) == float("inf")
    action = flights.action.copy()
    action[10, 1, 3] += 0.01
    assert 0 < replay(world, replace(flights, action=action)) < 0.1
