"""The ladder end to end, with real notebooks, real kernels and real signals."""
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import nbformat
import psutil
import pytest
from conftest import EXAM, TRAIN, notebook

from rlnb.lab.runs import Run


def wait_for(condition, seconds: float = 60, what: str = "it"):
    "Waits until a condition holds."
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {seconds} s")


def logged(project, least: int = 2):
    "The newest run, once it has logged a few rows."
    records = project.records()
    run = Run.open(project.settings().runs / records[-1]["id"]) if records else None
    return run if run and len(run.metrics()) >= least else None


def executed(project) -> dict[str, float]:
    "When each packet was last written."
    return {str(p.relative_to(project.root)): p.stat().st_mtime for p in project.root.glob("reports/packets/*/*.ipynb")}


def test_two_rungs_and_nothing_to_do_the_second_time(project):
    first = project.rlnb("ladder", "--until", "point_hold")
    assert first.returncode == 0, first.stderr
    assert "hover: passed" in first.stdout and "point_hold: passed" in first.stdout and "position error 1.0 cm" in first.stdout
    index = project.root / "reports" / "site" / "index.html"
    assert f"site: {os.path.relpath(index, project.root)}" in first.stdout and index.as_uri() in first.stdout
    hover, hold = project.records()
    assert (hover["status"], hold["status"]) == ("passed", "passed") and hold["parent"] == hover["id"]
    assert hold["parameters"]["checkpoint"] == f"data/runs/{hover['id']}/checkpoints/1000000"
    assert hover["command"] == "__main__.py ladder --until point_hold" and hover["ended"]
    state = json.loads((project.root / "data" / "state.json").read_text())
    assert state["current_stage"] == "point_reach" and set(state["best"]) == {"hover", "point_hold"}

    before, began = executed(project), time.monotonic()
    second = project.rlnb("ladder", "--until", "point_hold")
    seconds = time.monotonic() - began
    assert second.returncode == 0 and second.stdout.count("up to date") >= 2 and "nothing was executed" in second.stdout
    assert executed(project) == before and len(project.records()) == 2
    assert seconds < 10, f"{seconds:.1f} s"


def test_what_changed_is_executed_again_and_nothing_else(project):
    assert project.rlnb("ladder", "--until", "hover").returncode == 0
    before = executed(project)
    train, exam = sorted(before, reverse=True)

    project.edit("data/gates.toml", '["crash_rate", "<=", 0.02]', '["crash_rate", "<=", 0.03]')  # a pass limit: the exam depends on it
    again = project.rlnb("ladder", "--until", "hover")
    assert again.returncode == 0 and "trained already" in again.stdout
    assert executed(project)[train] == before[train] and executed(project)[exam] > before[exam]

    cells = list(TRAIN)
    cells[-1] = "# a remark changes nothing\n" + cells[-1]
    notebook(project.root / "nbs" / "stages" / "tracker_train.ipynb", cells, "Another title")
    assert "nothing was executed" in project.rlnb("ladder", "--until", "hover").stdout

    cells[-1] += "\nprint('something else')"
    notebook(project.root / "nbs" / "stages" / "tracker_train.ipynb", cells)
    assert "training to" in project.rlnb("ladder", "--until", "hover").stdout
    assert len(project.records()) == 2, "another training is another run"
    assert "training to" in project.rlnb("ladder", "--until", "hover", "--seed", "2").stdout
    assert "training to" in project.rlnb("ladder", "--until", "hover", "--fresh").stdout
    assert [r["seeds"] for r in project.records()] == [[1], [1], [2], [1]]


def test_a_fail_gets_the_extension_once_and_then_stops_the_ladder(project):
    (project.root / "needed_steps.json").write_text(json.dumps({"hover": 6_000_000, "point_hold": 99_000_000}))
    done = project.rlnb("ladder", "--until", "point_reach")
    assert done.returncode == 2, done.stderr
    hover, hold = project.records()
    assert (hover["status"], hold["status"]) == ("passed", "failed") and "gate: " in hold["error"]
    assert hover["extended_to"] == 6_000_000 and hold["extended_to"] == 7_000_000
    milestones = Run.open(project.settings().runs / hover["id"]).evaluation("milestones")
    assert milestones == {"first": 1_000_000, "last": 6_000_000}, "the extension went on from the last checkpoint"
    assert "point_hold: NOT passed: crash_rate" in done.stdout and "point_reach" not in done.stdout
    assert "point_hold: decision continue_same_stage_more_steps: " in done.stdout and "decision" not in hover
    assert hold["decision"] == "continue_same_stage_more_steps"
    assert (project.root / "reports" / "packets" / hold["id"] / "tracker_review.ipynb").exists()
    state = json.loads((project.root / "data" / "state.json").read_text())
    assert state["open_decision"] == {"run": hold["id"], "stage": "point_hold", "decision": "continue_same_stage_more_steps"}
    again = project.rlnb("ladder", "--until", "point_reach")
    assert again.returncode == 2 and "nothing has changed since" in again.stdout and len(project.records()) == 2


def test_ctrl_c_in_mid_training(project):
    process = project.start("ladder", "--until", "hover", TEST_PACE="0.4")
    run = wait_for(lambda: logged(project), what="training")
    os.killpg(process.pid, signal.SIGINT)  # like a terminal: to the whole group
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err.count("\n") == 1 and "interrupted" in err and "same command again" in err
    record = run.record
    assert record["status"] == "interrupted" and record["ended"] and "interrupted at step" in record["error"]
    assert not (run.folder / "lock").exists()
    packet = nbformat.read(project.root / "reports" / "packets" / run.id / "tracker_train.ipynb", as_version=4)
    assert packet.metadata["rlnb"]["status"] == "interrupted" and packet.cells[-1].execution_count is None
    page = project.root / "reports" / "site" / "packets" / run.id / "tracker_train.html"
    assert "Interrupted: " in page.read_text(), "the partial packet is published as what it is"

    steps = run.last_step()
    again = project.rlnb("ladder", "--until", "hover")
    assert again.returncode == 0 and "goes on from its last checkpoint" in again.stdout
    assert len(project.records()) == 1 and run.record["status"] == "passed" and run.record["error"] is None
    assert run.evaluation("milestones")["first"] >= steps > 0, "nothing that was complete is lost"
    assert list(run.metrics().step) == [100_000 * n for n in range(1, 11)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_command_line_stops_the_kernel_too(project, number):
    process = project.start("ladder", "--until", "hover", TEST_PACE="0.4")
    run = wait_for(lambda: logged(project), what="training")
    kernels = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number or process.returncode == 130
    assert run.record["status"] == "interrupted"
    assert kernels and not any(k.is_running() and k.status() != psutil.STATUS_ZOMBIE for k in kernels)


def test_a_killed_kernel(project):
    process = project.start("ladder", "--until", "hover", TEST_PACE="0.4")
    run = wait_for(lambda: logged(project), what="training")
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.count("\n") == 1 and "its kernel died" in err and "run the same command again" in err
    assert run.record["status"] == "crashed" and "kernel died" in run.record["error"]
    assert project.rlnb("ladder", "--until", "hover").returncode == 0
    assert run.record["status"] == "passed" and run.evaluation("milestones")["first"] > 0


def test_a_killed_command_line(project):
    "SIGKILL to the parent: its kernel notices and ends, the next start marks the run and resumes it."
    process = project.start("ladder", "--until", "hover", TEST_PACE="0.4")
    run = wait_for(lambda: logged(project), what="training")
    kernels = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()
    assert run.record["status"] == "running", "nobody could tell it anything"
    wait_for(lambda: not any(k.is_running() and k.status() != psutil.STATUS_ZOMBIE for k in kernels), 20, "the kernel's end")
    again = project.rlnb("ladder", "--until", "hover")
    assert again.returncode == 0, again.stderr
    assert f"{run.id}: its process is gone" in again.stdout and "goes on from its last checkpoint" in again.stdout
    assert run.record["status"] == "passed" and run.evaluation("milestones")["first"] > 0


def test_a_second_ladder_keeps_its_hands_off_a_running_one(project):
    process = project.start("ladder", "--until", "hover", TEST_PACE="0.4")
    run = wait_for(lambda: logged(project, 1), what="training")
    other = project.rlnb("ladder", "--until", "hover")
    assert other.returncode == 1 and "is being written by process" in other.stderr and f"kill {process.pid}" in other.stderr
    assert run.record["status"] == "running"
    assert process.wait(timeout=60) == 0
    process.communicate()


ERRORS = {
    "an error in the training": (0, "raise ValueError('the motors are <missing>')", "ValueError: the motors are <missing>"),
    "no best checkpoint": (0, "raise SystemExit(0)", "did not write evaluations/best.json"),
    "NaN in the exam": (1, "metrics['crash_rate'] = float('nan')\nrun.save_evaluation('exam', {'metrics': metrics})", "crash_rate is nan"),
    "an exam that measures nothing": (1, "run.save_evaluation('exam', {'metrics': {}})", "crash_rate is missing"),
    "an exam that is no table": (1, "run.save_evaluation('exam', [1, 2])", "crash_rate is missing"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_what_goes_wrong_in_a_notebook_is_named_and_recorded(project, what):
    which, code, words = ERRORS[what]
    cells = [list(TRAIN), list(EXAM)][which]
    cells.insert(2 if which == 0 else 3, code)
    notebook(project.root / "nbs" / "stages" / f"tracker_{('train', 'exam')[which]}.ipynb", cells)
    done = project.rlnb("ladder", "--until", "hover")
    assert done.returncode == (1 if which == 0 else 2)
    assert words in done.stdout + done.stderr and done.stderr.count("\n") == (which == 0)
    record = project.records()[-1]
    assert record["status"] == "failed" and words in record["error"] and record["ended"]
    page = next((project.root / "reports" / "site" / "packets" / record["id"]).glob("*.html")).read_text()
    assert "<missing>" not in page


def test_unknown_and_locked_stages(project):
    for words in (["stage", "hoover"], ["ladder", "--until", "hoover"], ["ladder", "--from", "hoover"]):
        done = project.rlnb(*words)
        assert done.returncode == 1 and "unknown stage 'hoover' (did you mean 'hover'?)" in done.stderr and done.stderr.count("\n") == 1
    done = project.rlnb("stage", "point_hold")
    assert done.returncode == 1 and "point_hold is locked: hover has not passed" in done.stderr
    done = project.rlnb("ladder", "--from", "point_reach", "--until", "hover")
    assert done.returncode == 1 and "swap them" in done.stderr
    done = project.rlnb("stage", "planner_integration_smoke")
    assert done.returncode == 1 and "planner_integration_smoke is locked" in done.stderr and "--checkpoint" in done.stderr
    done = project.rlnb("stage", "hover", "--checkpoint", "nowhere")
    assert done.returncode == 1 and "no such folder" in done.stderr
    assert not project.records()


def test_a_rung_stands_on_the_rung_below_of_its_own_seed(project):
    assert project.rlnb("ladder", "--until", "hover").returncode == 0
    other = project.rlnb("stage", "point_hold", "--seed", "2")
    assert other.returncode == 1 and "hover has not passed under seed 2" in other.stderr
    assert project.rlnb("stage", "point_hold").returncode == 0


def test_a_single_stage_with_its_own_budget_and_checkpoint(project):
    done = project.rlnb("stage", "hover", "--timesteps", "20_000", "--verbose")
    assert done.returncode == 0 and "trained hover from 0 to 20000" in done.stdout
    own = f"data/runs/{project.records()[0]['id']}/checkpoints/20000"
    done = project.rlnb("stage", "point_hold", "--timesteps", "2e4", "--checkpoint", own)
    assert done.returncode == 0 and project.records()[1]["parameters"]["checkpoint"] == own


def test_flags_reach_the_notebooks(project):
    assert project.rlnb("ladder", "--until", "hover", "--seed", "7", "--runs", "elsewhere").returncode == 0
    run = next((project.root / "elsewhere").glob("hover-*"))
    assert json.loads((run / "evaluations" / "settings.json").read_text()) == {"seed": 7, "wandb_mode": "disabled"}
    assert run.name.endswith("-s7") and not list((project.root / "data").glob("runs/*"))


@pytest.mark.parametrize("size", [(40, 140), (0, 0)])  # a real terminal, and one that was never told its size
def test_the_bar_on_a_terminal(project, size):
    "On a real terminal there is a bar with step, speed, time left and position error."
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    command = [sys.executable, "-m", "rlnb.cli", "ladder", "--until", "hover"]
    process = subprocess.Popen(command, cwd=project.root, stdout=child, stderr=child,
                               env=project.environment(TEST_PACE="0.2", TERM="xterm"))
    os.close(child)
    seen = b""
    while True:
        try:
            chunk = os.read(parent, 4096)
        except OSError:
            break
        if not chunk:
            break
        seen += chunk
    os.close(parent)
    assert process.wait() == 0
    text = seen.decode()
    assert re.search(r"hover +\d+% .*/1\.00M steps, .*steps/s, .*left, position error \d+\.\d cm", text), text
