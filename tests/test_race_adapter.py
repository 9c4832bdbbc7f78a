"""The controller for the public course: what it accepts, what it answers."""
import numpy as np
import pytest

from rlnb.race.adapter import RaceController, sensed_from
from rlnb.race.levels import GATES
from rlnb.tracker.dynamics import Quadrotor

CONFIG = {"env": {"control_mode": "attitude", "freq": 50}, "sim": {"drone_model": "cf21B_500"}}


def observation(**changed) -> dict:
    "A drone at rest on the ground, in the public course's words."
    x = np.arange(4.0) * 0.9
    return {"pos": np.zeros(3), "quat": np.array([0.0, 0, 0, 1]), "vel": np.zeros(3), "ang_vel": np.zeros(3), "target_gate": 0,
            "gates_pos": np.stack([x - 1, 0 * x + 0.8, 0 * x + 0.7], axis=-1),
            "gates_quat": np.tile([0.0, 0, np.sin(0.3), np.cos(0.3)], (4, 1)),
            "gates_visited": np.array([True, False, False, False]), "obstacles_pos": np.stack([x - 1, 0 * x - 1, 0 * x + 1.55], axis=-1),
            "obstacles_visited": np.zeros(4, bool)} | changed


def test_observations_are_read_with_their_units_and_flags():
    sensed = sensed_from(observation(target_gate=2), step=7)
    assert sensed.target.tolist() == [2] and sensed.step.tolist() == [7] and sensed.alive.tolist() == [True]
    assert np.allclose(sensed.gate_rotation[0, 0], [[np.cos(0.6), -np.sin(0.6), 0], [np.sin(0.6), np.cos(0.6), 0], [0, 0, 1]], atol=1e-6)
    assert sensed.gate_seen.tolist() == [[True, False, False, False]] and sensed.pole.shape == (1, 4, 3)
    over = sensed_from(observation(target_gate=-1), step=9)
    assert over.target.tolist() == [GATES] and over.alive.tolist() == [False]


def test_observations_that_do_not_fit_are_named():
    without = observation()
    del without["gates_quat"]
    with pytest.raises(ValueError, match="no 'gates_quat'"):
        sensed_from(without, 0)
    with pytest.raises(ValueError, match=r"gates_pos has the shape \(3, 3\)"):
        sensed_from(observation(gates_pos=np.zeros((3, 3))), 0)


@pytest.mark.parametrize("part, key, value", [("env", "control_mode", "state"), ("env", "freq", 100), ("sim", "drone_model", "cf2x_L250")])
def test_a_course_that_asks_for_something_else_is_refused(part, key, value):
    with pytest.raises(ValueError, match=key):
        RaceController(observation(), {}, CONFIG | {part: CONFIG[part] | {key: value}})


def test_commands_are_attitudes_within_the_drones_limits_and_a_new_race_begins_anew():
    controller, drone = RaceController(observation(), {}, CONFIG), Quadrotor()
    first = [controller.compute_control(observation()) for _ in range(40)]
    assert first[0].shape == (4,) and first[0].dtype == np.float32
    roll, pitch, yaw, thrust = np.array(first).T
    assert max(np.abs(roll).max(), np.abs(pitch).max()) <= drone.tilt_max + 1e-6 and np.abs(yaw).max() <= drone.yaw_max + 1e-6
    assert (thrust >= drone.thrust[0] - 1e-6).all() and thrust[-1] > drone.mass * 9.81  # the reference has gone up, the drone has not
    assert controller.step_callback(first[-1], observation(), -1.0, False, False, {}) is False
    assert controller.step_callback(first[-1], observation(target_gate=-1), 0.0, True, False, {}) is True
    controller.episode_callback()
    again = [controller.compute_control(observation()) for _ in range(40)]
    assert np.array_equal(first, again)


def test_a_planner_that_does_not_exist_is_named():
    class Ours(RaceController):
        planner = "quick"

    with pytest.raises(ValueError, match="no planner 'quick'"):
        Ours(observation(), {}, CONFIG)
