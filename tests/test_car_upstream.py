"""The ecosystem's own client at its repository's head, unchanged, against our stand-in. Skipped, loudly, where it is not installed."""
import importlib.util
import io
import logging
import time
from contextlib import redirect_stdout

import car_tools
import numpy as np
import pytest

car_tools.need_car_extra()
if importlib.util.find_spec("gym_donkeycar") is None:
    pytest.skip(
        "NOT TESTED: gym_donkeycar is not installed; pip install git+https://github.com/tawnkramer/gym-donkeycar (1.3.1 or later)",
        allow_module_level=True,
    )

import gymnasium as gym  # noqa: E402
from car_tools import nothing_left_behind, stand_in  # noqa: E402, F401

from rlnb.car.environment import Deadlines, DonkeyEnv  # noqa: E402
from rlnb.car.protocol import ENVIRONMENT_IDS, BadTelemetry, NoSimulator, SimulatorError, UnknownScene  # noqa: E402
from rlnb.car.simulator import WorldConfig  # noqa: E402
from rlnb.car.upstream import UpstreamEnv, upstream_version  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("nothing_left_behind"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # gymnasium's, about upstream's spaces and registration
]
QUICK = Deadlines(connect=1.0, greet=1.0, scene=5.0, reset=5.0, step=2.0)
CONF = {
    "exe_path": "remote",
    "host": "127.0.0.1",
    "body_style": "donkey",
    "body_rgb": (128, 128, 128),
    "car_name": "me",
    "font_size": 100,
    "start_delay": 0,
    "max_cte": 5,
    "log_level": logging.WARNING,
    "lidar_config": {
        "deg_per_sweep_inc": 2.0,
        "deg_ang_down": 0.0,
        "deg_ang_delta": -1.0,
        "num_sweeps_levels": 1,
        "max_range": 50.0,
        "noise": 0.4,
        "offset_x": 0.0,
        "offset_y": 0.5,
        "offset_z": 0.5,
        "rot_x": 0.0,
    },
}


def upstream_env(name, port, **conf):
    from gym_donkeycar.envs import donkey_env
    kinds = {
        "generated_road": "GeneratedRoadsEnv",
        "warehouse": "WarehouseEnv",
        "sparkfun_avc": "AvcSparkfunEnv",
        "generated_track": "GeneratedTrackEnv",
        "mountain_track": "MountainTrackEnv",
        "roboracingleague_1": "RoboRacingLeagueTrackEnv",
        "waveshare": "WaveshareEnv",
        "mini_monaco": "MiniMonacoEnv",
        "warren": "WarrenTrackEnv",
        "thunderhill": "ThunderhillTrackEnv",
        "circuit_launch": "CircuitLaunchEnv",
    }
    with redirect_stdout(io.StringIO()):
        return getattr(donkey_env, kinds[name])(conf={**CONF, "port": port, **conf})


def test_version():
    assert upstream_version()


@pytest.mark.parametrize("scene", ["warehouse", "generated_road", "mini_monaco"])
def test_its_own_loop_reset_and_steps(scene):
    "Upstream's example: random actions until the episode is over, then again."
    with stand_in() as server:
        env = upstream_env(scene, server.port)
        for _ in range(2):
            observation, info = env.reset()
            assert observation.shape == (120, 160, 3) and info["hit"] == "none"
            for _ in range(200):
                observation, _reward, terminated, _truncated, info = env.step(env.action_space.sample())
                if terminated:
                    break
            assert observation.dtype == np.uint8 and len(info["lidar"]) == 180 and info["speed"] > 0
        env.close()


def test_scene_change():
    with stand_in() as server:
        env = upstream_env("warehouse", server.port)
        env.reset()
        env.viewer.exit_scene()
        time.sleep(1.0)
        env.reset()
        assert env.step((0.0, 0.5))[4]["hit"] == "none"
        assert next(iter(server.sessions.values())).world.config.scene == "warehouse"
        env.close()
        other = upstream_env("warren", server.port)
        other.reset()
        other.step((0.0, 0.5))
        other.close()


def test_lap_events_reach_it():
    with stand_in(world=WorldConfig(jitter=0.0)) as server:
        env = upstream_env("waveshare", server.port, max_cte=8)
        from rlnb.car.tracks import named_track
        track, (_, info) = named_track("waveshare"), env.reset()
        for _ in range(600):
            node = int(np.argmin(np.hypot(*(track.points - 8 * np.array([info["pos"][0], info["pos"][2]])).T)))
            wrong = (np.radians(info["car"][2]) - track.heading[node] + np.pi) % (2 * np.pi) - np.pi
            _, _, terminated, _, info = env.step(
                (float(np.clip(-0.3 * info["cte"] - 1.8 * wrong + 5 * track.curvature[(node + 6) % len(track.points)], -1, 1)), 0.3)
            )
            assert not terminated
            if info["lap_count"]:
                break
        assert info["lap_count"] == 1 and info["last_lap_time"] == pytest.approx(track.length / 9, rel=0.15)
        env.close()


# ---- the same suite through our adapter and our own environment

@pytest.fixture(params=[DonkeyEnv, UpstreamEnv], ids=["own", "gym-donkeycar"])
def make(request):
    return lambda scene, port: request.param(scene, port=port, deadlines=QUICK)


def test_both_clients_drive_alike(make):
    with stand_in(world=WorldConfig(jitter=0.0, image_noise=0.0)) as server:
        env = make("waveshare", server.port)
        observation, info = env.reset()
        assert observation.shape == (120, 160, 3) and info["progress"] == 0 and abs(info["cte"]) < 0.01
        for _ in range(40):
            observation, reward, terminated, _truncated, info = env.step((0.05, 0.4))
        assert info["progress"] > 0.05 and info["total_nodes"] > 100 and info["forward_vel"] > 0.5 and not terminated
        while not terminated:
            _, reward, terminated, _, info = env.step((1.0, 0.5))
        assert info["over"] == "off_track" and reward == -1
        _, info = env.reset()
        assert info["over"] == "" and abs(info["cte"]) < 0.01
        env.close()


def test_both_clients_name_what_is_wrong(make):
    with pytest.raises(NoSimulator):
        make("waveshare", 9)
    with stand_in() as server:
        with pytest.raises((UnknownScene, ValueError)):
            make("monza", server.port)


def test_both_clients_name_telemetry_that_is_no_number(make, monkeypatch):
    from rlnb.car.server import Session
    report = Session.report
    monkeypatch.setattr(Session, "report", lambda self, t: {**report(self, t), **({"cte": float("nan")} if t.throttle > 0.1 else {})})
    with stand_in() as server:
        env = make("waveshare", server.port)
        env.reset()
        with pytest.raises(BadTelemetry, match="cte"):
            for _ in range(20):
                env.step((0.0, 0.5))
        env.close()


def test_both_clients_notice_a_server_that_dies(make):
    from rlnb.car.server import ServerConfig, SimulatorServer
    server = SimulatorServer(ServerConfig(port=0)).__enter__()
    env = make("waveshare", server.port)
    env.reset()
    env.step((0.0, 0.3))
    server.stop()
    began = time.monotonic()
    with pytest.raises(SimulatorError):
        for _ in range(10):
            env.step((0.0, 0.3))
    assert time.monotonic() - began < 6
    env.close()


def test_ids_are_upstreams():
    import gym_donkeycar  # noqa: F401  (it registers its environments, ours give way)
    assert all(str(gym.registry[name].entry_point).startswith("gym_donkeycar") for name in ENVIRONMENT_IDS.values())
