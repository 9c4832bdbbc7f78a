"""W&B beside the local log: silent, bounded, never in the way."""
import http.server
import socket
import subprocess
import sys
import threading
import time

import pytest

from rlnb.lab.log import wandb_run
from rlnb.lab.runs import Run
from rlnb.lab.settings import load_settings

CODE = """\
import sys, time, warnings
from rlnb.lab.log import wandb_run
from rlnb.lab.runs import Run
from rlnb.lab.settings import load_settings
settings = load_settings()
run = Run.create(settings, "hover", {"timesteps": 3}, 1).start()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with wandb_run(run, settings):
        for step in (1, 2, 1, 2, 3):  # a resume goes back
            run.log(step, loss=1 / step, words="stay here")
run.finish("passed")
print(run.id, len(caught), *[str(c.message) for c in caught if "W&B" in str(c.message)], sep="|")
"""


def logged(project, **extra):
    "Logs a run to W&B in a process of its own: its record, what it said, and how long it took."
    began = time.monotonic()
    command, environment = [sys.executable, "-c", CODE], project.environment(**extra)
    done = subprocess.run(command, cwd=project.root, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1].split("|")
    return Run.open(last[0], project.settings()), last[2:], done, time.monotonic() - began


def test_disabled_does_not_even_import_it(project):
    code = CODE + "assert 'wandb' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=project.root, env=project.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(project.root.glob("data/runs/*/wandb"))


def test_offline_is_silent_and_leaves_a_folder_to_sync(project):
    run, warned, done, _ = logged(project, RLNB_WANDB_MODE="offline")
    assert done.stderr == "" and done.stdout.count("\n") == 1 and warned == []
    about = run.record["wandb"]
    assert about["mode"] == "offline" and about["url"] is None and about["start_seconds"] < 20
    assert list((run.folder / about["folder"]).glob("*.wandb")) and about["folder"].startswith("wandb/")
    assert list(run.metrics().step) == [1, 2, 3]


class Hanging(http.server.BaseHTTPRequestHandler):
    "Answers whoever asks whether it is there, and never answers anything else."

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        time.sleep(600)

    def log_message(self, *words):
        pass


@pytest.fixture(params=["nobody", "deaf", "hanging"])
def server(request):
    "An address where W&B can't be reached, in three ways."
    if request.param == "nobody":
        yield "http://127.0.0.1:9"
    elif request.param == "deaf":  # takes the connection and stays silent
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            yield f"http://127.0.0.1:{deaf.getsockname()[1]}"
    else:
        hanging = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hanging)
        hanging.daemon_threads = True
        threading.Thread(target=hanging.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{hanging.server_address[1]}"
        hanging.shutdown()


def test_online_without_a_network_falls_back_within_its_time(project, server):
    run, warned, done, seconds = logged(project, RLNB_WANDB_MODE="online", RLNB_WANDB_TIMEOUT="3 s", WANDB_BASE_URL=server,
                                        WANDB_API_KEY="k" * 40)
    assert run.record["wandb"]["mode"] == "offline" and len(warned) == 1 and "logged offline" in warned[0]
    assert run.record["status"] == "passed" and len(run.metrics()) == 3
    assert seconds < 30, f"{seconds:.0f} s"
    assert "Traceback" not in done.stderr


def test_a_dashboard_that_cannot_start_costs_no_training(project, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    settings = load_settings(project.root, env={}, flags={"wandb_mode": "offline"})
    run = Run.create(settings, "hover", {}, 1).start()
    with pytest.warns(UserWarning, match="local log only"), wandb_run(run, settings):
        run.log(1, loss=1.0)
    assert run.record["wandb"]["mode"] == "failed" and len(run.metrics()) == 1
    run.finish("passed")
