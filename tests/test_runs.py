"""Runs survive what happens to them."""
import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from rlnb.lab.errors import LabError
from rlnb.lab.runs import Run, State, from_plain, read_json, read_lines, recover, runs, timeline, to_plain, write_json

plain = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["", "a", "ü"]),
                     lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3))


def python(project, code: str, **extra) -> subprocess.Popen:
    "A second process that works in the project."
    return subprocess.Popen([sys.executable, "-c", code], cwd=project.root, env=project.environment(**extra), stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


@given(plain)
def test_values_survive_json(value):
    assert from_plain(json.loads(json.dumps(to_plain(value), allow_nan=False))) == value


def test_numbers_of_numpy_become_plain():
    found = to_plain({"a": np.float32(0.5), "b": np.arange(3), "c": np.float64("nan"), "d": [np.int64(2), np.inf]})
    assert found == {"a": 0.5, "b": [0, 1, 2], "c": "NaN", "d": [2, "Infinity"]}


def test_a_file_is_the_old_or_the_new_one_never_a_half(project):
    "A writer is killed again and again in the middle of replacing a file."
    path = project.root / "value.json"
    code = (f"from rlnb.lab.runs import write_json\nimport itertools\nfor n in itertools.count():\n"
            f"    write_json({str(path)!r}, [n] * 20000)\n    if n == 3: print('go', flush=True)")
    for _ in range(4):
        writer = python(project, code)
        writer.stdout.readline()
        time.sleep(0.05)
        writer.kill()
        writer.wait()
        assert len(set(read_json(path))) == 1 and len(read_json(path)) == 20000


def test_the_log_survives_a_tear_anywhere(project):
    run = Run.create(project.settings(), "hover", {}, 1).start()
    for step in range(1, 6):
        run.log(step, x=step / 3)
    run.close()
    path = run.folder / "metrics.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        complete = sum(1 for n in range(1, 6) if len(b"".join(lines[:n])) <= cut)
        assert len(run.metrics()) == complete
        again = Run.open(run.folder, writer=True)
        again.log(100, x=1.0)
        again.close()
        whole_lines = complete + (cut in {len(b"".join(lines[:n])) - 1 for n in range(1, 6)})  # only a line break was torn off
        assert list(again.metrics().step)[-1] == 100 and len(again.metrics()) == whole_lines + 1


def test_lines_that_are_still_being_written_wait(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    rows, offset = read_lines(path)
    assert [r["step"] for r in rows] == [1, 2]
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert [r["step"] for r in read_lines(path, offset)[0]] == [3]
    assert read_lines(tmp_path / "nothing") == ([], 0)


@given(st.lists(st.integers(0, 20), max_size=30))
def test_a_timeline_rises_and_keeps_the_last_flight(steps):
    kept = timeline([{"step": step, "n": n} for n, step in enumerate(steps)])
    assert [r["step"] for r in kept] == sorted({r["step"] for r in kept})
    for row in kept:  # nothing later in the log goes back behind a row that is kept
        assert all(step >= row["step"] for step in steps[row["n"]:])


def test_nan_is_logged_readably(project):
    run = Run.create(project.settings(), "hover", {}, 1).start()
    run.log(1, loss=math.nan, scale=math.inf)
    run.close()
    json.loads((run.folder / "metrics.jsonl").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert math.isnan(run.metrics().loss[0]) and math.isinf(run.metrics().scale[0])


def test_two_processes_never_write_one_run(project):
    run = Run.create(project.settings(), "hover", {}, 1).start()
    code = f"from rlnb.lab.runs import Run\nRun.open({str(run.folder)!r}, writer=True)\nprint('in')"
    other = python(project, code)
    out, err = other.communicate()
    assert "in" not in out and f"process {os.getpid()}" in err
    joined = python(project, code, **run.writer_environment)
    assert joined.communicate()[0].strip() == "in"
    run.close()
    late = python(project, code)
    assert late.communicate()[0].strip() == "in", "the lock was given back"


def test_one_of_many_gets_the_lock_of_a_dead_process(project):
    "Ten processes start at once to take over from one that is dead; exactly one succeeds."
    run = Run.create(project.settings(), "hover", {}, 1)
    run.close()
    dead = {"host": os.uname().nodename, "pid": 2**22 - 1, "started": 1.0}
    write_json(run.folder / "lock", {"token": "x", "holders": [dead]})
    code = (f"from rlnb.lab.runs import Run\nimport time\nRun.open({str(run.folder)!r}, writer=True)\n"
            "print('in', flush=True)\ntime.sleep(30)")
    crowd = [python(project, code) for _ in range(6)]
    try:
        for _ in range(200):
            if sum(p.poll() is not None for p in crowd) == 5:
                break
            time.sleep(0.1)
        assert sum(p.poll() is None for p in crowd) == 1
    finally:
        for process in crowd:
            process.kill()
            process.communicate()


def test_a_reused_process_number_is_not_taken_for_alive(project):
    run = Run.create(project.settings(), "hover", {}, 1).start()
    run.close()
    other_life = {"host": os.uname().nodename, "pid": os.getpid(), "started": 1.0}
    write_json(run.folder / "lock", {"token": "x", "holders": [other_life]})
    assert recover(project.settings()) == [run.id]


def test_a_killed_run_is_recognised_and_keeps_what_was_complete(project):
    code = ("import os, signal\nfrom rlnb.lab.runs import Run\nfrom rlnb.lab.settings import load_settings\n"
            "run = Run.create(load_settings(), 'hover', {'timesteps': 5}, 3).start()\nrun.log(4096, x=1)\nrun.save_evaluation('a', [1])\n"
            "print(run.id, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)")
    victim = python(project, code)
    name = victim.communicate()[0].strip()
    assert victim.returncode == -signal.SIGKILL
    done = project.rlnb("runs")
    assert "crashed" in done.stdout
    run = Run.open(name, project.settings())
    assert run.record["status"] == "crashed" and "at step 4096" in run.record["error"] and run.record["ended"]
    assert run.evaluation("a") == [1] and len(run.metrics()) == 1


def test_many_updates_at_once_lose_nothing(project):
    run = Run.create(project.settings(), "hover", {}, 1).start()
    code = (f"from rlnb.lab.runs import Run\nimport sys\nrun = Run.open({str(run.folder)!r}, writer=True)\n"
            "for n in range(20): run.update(**{f'{sys.argv[1]}{n}': n})")
    environment = project.environment(**run.writer_environment)
    crowd = [subprocess.Popen([sys.executable, "-c", code, name], cwd=project.root, env=environment) for name in "abc"]
    assert [p.wait() for p in crowd] == [0, 0, 0]
    assert all(run.record[f"{name}{n}"] == n for name in "abc" for n in range(20))


READ_ONLY = ["{root}/settings.ini/runs", "/proc/rlnb"]  # below a file, and where not even root may write


@pytest.mark.parametrize("place", READ_ONLY)
@pytest.mark.parametrize("flag", ["--runs", "--reports", "--state"])
def test_a_folder_that_cannot_be_written_is_one_line(project, place, flag):
    place = place.format(root=project.root)
    done = project.rlnb("ladder", "--until", "hover", flag, place)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert (place if flag != "--state" else os.path.dirname(place)) in done.stderr
    assert flag in done.stderr, "it says what to do"
    for record in project.records():  # whatever had begun says what happened to it
        assert record["status"] in ("failed", "passed") and (record["status"] == "passed" or record["error"])


def test_ids_and_names(project):
    settings = project.settings()
    made = [Run.create(settings, "hover", {}, 1) for _ in range(3)]
    assert len({run.id for run in made}) == 3
    assert Run.open(made[0].folder).id == made[0].id
    with pytest.raises(LabError, match="begin like that"):
        Run.open("hover", settings)
    with pytest.raises(LabError, match="no such run"):
        Run.open("hoover-2026", settings)
    with pytest.raises(LabError, match="no run was named"):
        Run.open("", settings)
    with pytest.raises(LabError, match="none of"):
        made[0].update(status="finished")
    with pytest.raises(LabError, match="no name"):
        made[0].save_evaluation("../../evil", {})
    with pytest.raises(LabError, match="for reading"):
        Run.open(made[0].folder).log(1, x=1)


def test_a_damaged_record_does_not_take_the_others_with_it(project):
    settings = project.settings()
    good, bad = Run.create(settings, "hover", {}, 1), Run.create(settings, "hover", {}, 2)
    good.start().finish("passed")
    bad.close()
    (bad.folder / "run.json").write_text('{"id": ')
    table = runs(settings).set_index("id")
    assert table.status[good.id] == "passed" and table.status[bad.id] == "crashed" and "run.json" in table.error[bad.id]
    assert State.rebuild(settings, ["hover"]).current_stage is None
    assert project.rlnb("runs").returncode == 0


def test_the_state_is_rebuilt_from_the_runs(project):
    settings = project.settings()
    run = Run.create(settings, "hover", {}, 1).start()
    run.save_evaluation("best", {"checkpoint": "checkpoints"})
    run.save_evaluation("verdict", {"passed": True, "gold": True})
    run.finish("passed")
    held = Run.create(settings, "point_hold", {}, 1).start()
    held.update(decision="hold_for_user_review")
    held.finish("held")
    done = project.rlnb("state", "rebuild")
    assert done.returncode == 0 and "next stage: point_hold" in done.stdout
    state = State.load(settings)
    assert state.best == {"hover": {"run": run.id, "checkpoint": "checkpoints", "gold": True}}
    assert state.open_decision == {"run": held.id, "stage": "point_hold", "decision": "hold_for_user_review"}
    settings.state.write_text("{")
    assert State.load(settings).best == state.best


def test_the_record_says_with_what_it_was_made(project):
    subprocess.run(["git", "init", "-q", "."], cwd=project.root, check=True)
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *author, "commit", "-qm", "x", "--allow-empty"], cwd=project.root, check=True)
    record = Run.create(project.settings(), "hover", {"timesteps": 3}, [1, 2], parent="p").record
    assert len(record["git"]["commit"]) == 40 and record["git"]["changed"] is False
    assert set(record["config_hashes"]) == {"settings.ini", "data/gates.toml"} and record["packages"]["jax"] and record["host"]
    assert record["seeds"] == [1, 2] and record["parent"] == "p" and record["parameters"] == {"timesteps": 3}
    assert str(ROOT) not in json.dumps(record)
