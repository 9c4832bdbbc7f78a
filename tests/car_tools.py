"""What the car wing's tests share: a skip that says why, a stand-in for a while, a peer that misbehaves as told."""
import contextlib
import gc
import importlib.util
import socket
import subprocess
import sys
import threading
import time
import warnings

import psutil
import pytest

MISSING = [name for name in ("cv2", "gymnasium", "numba", "stable_baselines3", "torch") if importlib.util.find_spec(name) is None]


def need_car_extra():
    "Skip a whole test file, loudly, where the extra `car` is not installed."
    if MISSING:
        reason = f"NOT TESTED: the car wing needs {', '.join(MISSING)}; .venv/bin/pip install -c constraints.txt -e '.[car]'"
        warnings.warn(reason, stacklevel=2)  # shown even where reasons of skips are not
        pytest.skip(reason, allow_module_level=True)


def alive():
    "What a test could leave behind: threads, open connections and listening ports, child processes."
    gc.collect()
    process = psutil.Process()
    sockets = {(c.fd, c.laddr, c.raddr) for c in process.net_connections("inet")}
    return set(threading.enumerate()) | sockets | {child.pid for child in process.children(recursive=True)}


@pytest.fixture
def nothing_left_behind():
    "No thread, socket or process of a test outlives it by more than three seconds."
    before = alive()
    yield
    end = time.monotonic() + 3
    while (left := alive() - before) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left


@contextlib.contextmanager
def stand_in(**settings):
    "A stand-in server in a thread, on a free port; afterwards neither thread nor port is left."
    from rlnb.car.server import ServerConfig, SimulatorServer
    with SimulatorServer(ServerConfig(port=0, **settings)) as server:
        yield server
    assert not server.thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((server.host, server.port), timeout=2)


SIM = [sys.executable, "-m", "rlnb.cli.main", "car", "sim", "--port", "0"]
LIDAR = {"degPerSweepInc": 2.0, "degAngDown": 0.0, "degAngDelta": -1.0, "numSweepsLevels": 1, "maxRange": 50.0, "noise": 0.0,
         "offset_x": 0.0, "offset_y": 0.5, "offset_z": 0.5, "rot_x": 0.0}


@contextlib.contextmanager
def sim_process():
    "`rlnb car sim` in a process of its own; yields the process and its port, and leaves neither."
    process = subprocess.Popen(SIM, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process, int(process.stdout.readline().split(" on 127.0.0.1:")[1].split(",")[0])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def peer(behave):
    "A server on a free port that treats its one client as `behave(sock)` says; yields the port."
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)

        def run():
            with contextlib.suppress(OSError), listener.accept()[0] as sock:
                behave(sock)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
    thread.join(20)
    assert not thread.is_alive()


class Talker:
    "A bare client: sends bytes, hears messages; remembers which kinds were ever said and heard."
    said, kinds = set(), set()

    def __init__(self, server):
        from rlnb.car.protocol import MessageParser
        self.sock, self.parser, self.heard = socket.create_connection((server.host, server.port), timeout=10), MessageParser(1 << 24), []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()

    def say(self, msg_type, **values):
        from rlnb.car.protocol import encode
        self.said.add(msg_type)
        self.sock.sendall(encode(msg_type, **values))

    def control(self, steering=0.0, throttle=0.0, brake=0.0):
        self.say("control", steering=steering, throttle=throttle, brake=brake)
        return self.hear("telemetry")

    def hear(self, kind):
        "The next message of a kind, reading past others (which stay in `heard`)."
        while True:
            for i, message in enumerate(self.heard):
                if message["msg_type"] == kind:
                    del self.heard[i]
                    return message
            data = self.sock.recv(1 << 16)
            assert data, f"the server closed the connection while we waited for {kind}"
            messages = self.parser.feed(data)
            self.kinds.update(m["msg_type"] for m in messages)
            self.heard += messages

    def closed(self):
        "Whether the server has closed the connection (waits for it)."
        with contextlib.suppress(ConnectionResetError):
            while self.sock.recv(1 << 16):
                pass
        return True
