"""Our environment against a simulator that behaves, one that does not, and none; each fault ends within its deadline with its own name."""
import contextlib
import json
import os
import signal
import socket
import subprocess
import time

import car_tools
import numpy as np
import pytest

car_tools.need_car_extra()

import gymnasium as gym  # noqa: E402
from car_tools import LIDAR, SIM, nothing_left_behind, peer, sim_process, stand_in  # noqa: E402, F401
from gymnasium.utils.env_checker import check_env  # noqa: E402

from rlnb.car.environment import Deadlines, DonkeyEnv, LocalEnv  # noqa: E402
from rlnb.car.protocol import (  # noqa: E402
    BadMessage,
    BadTelemetry,
    ConnectionLost,
    DeadlinePassed,
    ENVIRONMENT_IDS,
    MessageParser,
    NoSimulator,
    Refused,
    UnknownScene,
    encode_image,
)
from rlnb.car.server import PortTaken, ServerConfig, SimulatorServer  # noqa: E402
from rlnb.car.simulator import WorldConfig  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
QUICK = Deadlines(connect=1.0, greet=0.5, scene=1.0, reset=1.0, step=0.5)
IMAGE = encode_image(np.zeros((120, 160, 3), np.uint8))
FRAME = {"msg_type": "telemetry", "image": IMAGE, "hit": "none", "cte": 0.0, "speed": 0.0, "time": 0.0}


@pytest.mark.parametrize("name", sorted(ENVIRONMENT_IDS.values()))
def test_every_environment_id_drives(name):
    with stand_in() as server:
        env = gym.make(name, port=server.port)
        observation, info = env.reset(seed=1)
        assert observation.shape == (120, 160, 3) and observation.dtype == np.uint8 and info["total_nodes"] > 100
        for _ in range(20):
            observation, reward, terminated, _truncated, info = env.step(np.array([0.0, 0.5], np.float32))
        assert info["progress"] > 0 and info["speed"] > 0.3 and reward > 0 and not terminated
        env.close()


def test_gymnasium_contract_in_process_and_over_the_wire():
    check_env(LocalEnv(WorldConfig(scene="waveshare")), skip_render_check=True)
    with stand_in(world=WorldConfig(image_noise=0.0, jitter=0.0)) as server:  # a client cannot seed a simulator
        env = DonkeyEnv("waveshare", port=server.port)
        check_env(env, skip_render_check=True)
        env.close()


def test_episode_ends_beyond_max_cte_and_starts_anew():
    with stand_in() as server:
        env = DonkeyEnv("generated_track", port=server.port, max_cte=4.0)
        for _ in range(2):
            _, info = env.reset()
            assert abs(info["cte"]) < 1 and info["lap_count"] == 0 and info["progress"] == 0
            terminated, steps = False, 0
            while not terminated:
                _, reward, terminated, _, info = env.step((1.0, 0.5))
                steps += 1
            assert info["over"] == "off_track" and 4 < abs(info["cte"]) < 6 and reward == -1 and steps < 100
        env.close()


def test_random_tracks_are_offered_by_the_stand_in_only():
    with stand_in() as server:
        env = DonkeyEnv("random-7", port=server.port)
        env.reset()
        assert env.centre_line().closed
        env.close()


def test_open_road_has_two_ends():
    with stand_in(world=WorldConfig(seed=5)) as server:
        env = DonkeyEnv("generated_road", port=server.port)
        env.reset()
        assert not env.centre_line().closed
        env.close()


def test_lidar_and_other_camera():
    from dataclasses import replace

    from rlnb.car.camera import CameraConfig

    with stand_in() as server:
        env = DonkeyEnv(
            "warren", port=server.port, camera=replace(CameraConfig(), width=64, height=48, channels=1, encoding="PNG"), lidar=LIDAR
        )
        observation, info = env.reset()
        assert observation.shape == (48, 64, 1) and len(info["lidar"]) > 100
        env.close()


def test_real_time_simulator():
    with stand_in(realtime=True) as server:
        env = DonkeyEnv("waveshare", port=server.port)
        assert not env.lockstep
        env.reset()
        began = time.monotonic()
        for _ in range(20):
            env.step((0.0, 0.4))
        assert 0.6 < time.monotonic() - began < 4
        time.sleep(0.5)  # the network is being trained: frames pile up
        _, _, _, _, info = env.step((0.0, 0.0))
        newest = next(iter(server.sessions.values())).world.time
        assert newest - env.started - info["time"] < 0.3 and info["gained"] > 1.0  # the newest frame, and what was driven meanwhile
        _, info = env.reset()
        assert info["speed"] < 0.1 and abs(info["cte"]) < 1
        env.close()


def test_real_time_slow_client_is_not_drowned():
    with stand_in(realtime=True) as server:
        env = DonkeyEnv("waveshare", port=server.port)
        env.reset()
        time.sleep(1.5)
        assert all(len(s.out) < 1 << 17 for s in server.sessions.values())
        env.step((0.0, 0.0))
        env.close()


# ---- faults

def named(kind, action, within):
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        action()
    assert time.monotonic() - began < within
    text = str(caught.value)
    assert "\n" not in text and "127.0.0.1" in text and "phase" in text and "expected" in text
    return text


def test_no_server():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert str(port) in named(NoSimulator, lambda: DonkeyEnv(port=port, deadlines=QUICK), 2)


def test_a_server_that_says_nothing():
    with peer(lambda sock: sock.recv(1)) as port:
        named(DeadlinePassed, lambda: DonkeyEnv(port=port, deadlines=QUICK), 2)


def test_a_server_that_closes_at_once():
    with peer(lambda sock: None) as port:
        named(ConnectionLost, lambda: DonkeyEnv(port=port, deadlines=QUICK), 2)


@pytest.mark.parametrize("junk", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x80\x81", b'{"msg_type": }\n', b'{"cte": 1}\n'])
def test_a_server_that_talks_garbage(junk):
    with peer(lambda sock: (sock.sendall(junk), sock.recv(1))) as port:
        named(BadMessage, lambda: DonkeyEnv(port=port, deadlines=QUICK), 2)


def test_half_a_message():
    with peer(lambda sock: (sock.sendall(b'{"msg_type": "scene_selec'), sock.recv(1))) as port:
        named(DeadlinePassed, lambda: DonkeyEnv(port=port, deadlines=QUICK), 2)


def test_unknown_scene():
    with stand_in() as server:
        assert "warren" in named(UnknownScene, lambda: DonkeyEnv("monza", port=server.port, deadlines=QUICK), 3)


def test_server_full():
    with stand_in(max_clients=1) as server:
        env = DonkeyEnv("warren", port=server.port)
        named(Refused, lambda: DonkeyEnv("warren", port=server.port, deadlines=QUICK), 2)
        env.reset()
        env.close()


def test_port_taken():
    with stand_in() as server:
        named(PortTaken, lambda: SimulatorServer(ServerConfig(port=server.port)), 1)


def actor(*frames, delay=0.0, then="listen"):
    "A one-scene simulator that answers the n-th control with the n-th frame (the last one again and again)."
    def behave(sock):
        parser, controls = MessageParser(), 0
        sock.sendall(b'{"msg_type":"scene_selection_ready","loaded":"1"}\n')
        while data := sock.recv(1 << 16):
            for message in parser.feed(data):
                if message["msg_type"] == "get_scene_names":
                    sock.sendall(
                        b'{"msg_type":"protocol_version","version":"2","lockstep":true}\n'
                        b'{"msg_type":"scene_names","scene_names":["warren"]}\n'
                    )
                elif message["msg_type"] == "load_scene":
                    sock.sendall(b'{"msg_type":"car_loaded"}\n')
                elif message["msg_type"] == "control":
                    frame = frames[min(controls, len(frames) - 1)]
                    controls += 1
                    time.sleep(delay if controls > 1 else 0)
                    if frame is None:
                        if then == "close":
                            return
                        continue
                    sock.sendall(frame if isinstance(frame, bytes) else json.dumps(frame).encode() + b"\n")
    return behave


def driven(port, steps=3):
    env = DonkeyEnv("warren", port=port, deadlines=QUICK)
    try:
        env.reset()
        for _ in range(steps):
            env.step((0.0, 0.1))
    finally:
        env.close()


def test_the_actor_is_fine_when_it_behaves():
    with peer(actor(FRAME)) as port:
        driven(port)


@pytest.mark.parametrize(
    "change",
    [
        {"cte": float("nan")},
        {"speed": float("inf")},
        {"pos_x": "1"},
        {"image": "!!!"},
        {"image": None},
        {"image": encode_image(np.zeros((60, 80, 3), np.uint8))},
    ],
)
def test_unusable_telemetry_in_mid_episode(change):
    with peer(actor(FRAME, FRAME, FRAME | change)) as port:
        named(BadTelemetry, lambda: driven(port), 3)


def test_no_image_at_all():
    with peer(actor({k: v for k, v in FRAME.items() if k != "image"})) as port:
        named(BadTelemetry, lambda: driven(port), 3)


def test_connection_lost_in_mid_episode():
    with peer(actor(FRAME, FRAME, None, then="close")) as port:
        named(ConnectionLost, lambda: driven(port), 3)


def test_half_a_frame_and_then_silence():
    with peer(actor(FRAME, json.dumps(FRAME).encode()[:500])) as port:
        named(DeadlinePassed, lambda: driven(port), 3)


def test_a_server_slower_than_the_deadline():
    with peer(actor(FRAME, delay=1.0)) as port:
        named(DeadlinePassed, lambda: driven(port), 3)


def test_a_server_slower_than_usual():
    with peer(actor(FRAME, delay=0.2)) as port:
        driven(port)


def test_after_a_fault_the_environment_stays_closed():
    with peer(actor(FRAME, FRAME, None, then="close")) as port:
        env = DonkeyEnv("warren", port=port, deadlines=QUICK)
        env.reset()
        with contextlib.suppress(ConnectionLost):
            for _ in range(5):
                env.step((0.0, 0.1))
        named(ConnectionLost, lambda: env.step((0.0, 0.1)), 1)
        env.close()


def test_real_server_killed_in_mid_episode():
    with sim_process() as (process, port):
        env = DonkeyEnv("waveshare", port=port, deadlines=Deadlines(step=2.0))
        env.reset()
        env.step((0.0, 0.3))
        os.kill(process.pid, signal.SIGKILL)
        named(ConnectionLost, lambda: [env.step((0.0, 0.3)) for _ in range(10)], 4)
        process.wait(5)
        named(NoSimulator, lambda: DonkeyEnv("waveshare", port=port, deadlines=QUICK), 2)


def test_real_server_stopped_in_mid_episode_passes_the_deadline():
    with sim_process() as (process, port):
        env = DonkeyEnv("waveshare", port=port, deadlines=Deadlines(step=1.0))
        env.reset()
        os.kill(process.pid, signal.SIGSTOP)
        named(DeadlinePassed, lambda: env.step((0.0, 0.3)), 3)


def test_sim_command_ends_on_interrupt_and_frees_its_port():
    process = subprocess.Popen([*SIM, "--scene", "warren"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert "stand-in simulator (not the Unity simulator)" in line
        port = int(line.split(" on 127.0.0.1:")[1].split(",")[0])
        env = DonkeyEnv(None, port=port)
        env.reset()
        env.step((0.0, 0.3))
        again = subprocess.run([*SIM, "--port", str(port)], capture_output=True, text=True, timeout=60)
        assert again.returncode == 1 and "port_taken" in again.stderr and again.stderr.count("\n") == 1
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        assert process.returncode == 0 and "control messages answered" in out
        env.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)
    finally:
        process.kill()
        process.wait()


def test_client_gone_in_mid_message_leaves_the_server_ready():
    with stand_in() as server:
        for _ in range(5):
            sock = socket.create_connection((server.host, server.port))
            sock.sendall(b'{"msg_type":"load_scene","scene_name":"warren"}{"msg_type":"contr')
            sock.close()
        env = DonkeyEnv("warren", port=server.port)
        env.reset()
        env.close()
        end = time.monotonic() + 3
        while server.sessions and time.monotonic() < end:
            time.sleep(0.01)
        assert not server.sessions
