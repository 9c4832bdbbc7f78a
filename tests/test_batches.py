"""Batches: what runs, what is skipped, and that a cluster does the same as this machine."""
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from conftest import ROOT, notebook

from rlnb.lab.batches import Job, expand, load_batch, pool, run_batch
from rlnb.lab.errors import LabError
from rlnb.lab.runs import Run, records

distributed = pytest.importorskip("distributed")

HEAD = "run_dir: str = ''  # the run's folder"
OPEN = "from pathlib import Path\nfrom rlnb.lab.runs import Run\nrun = Run.open(run_dir, writer=True)\n"
WORK = """
import os, time
pause = Path(root, 'pause')
if pause.exists():
    Path(root, f'worker-{seed}').write_text(str(os.getppid()))  # a kernel's parent is the worker
    while pause.exists():
        time.sleep(0.1)
if seed == 2 and Path(root, 'broken').exists():
    raise RuntimeError('the second seed is broken')
run.save_evaluation('weights', {'value': 10 * seed})
"""
FILE = """
name = "small"

[[job]]
name = "train"
notebook = "train.ipynb"
grid = { seed = [1, 2] }
artefacts = ["evaluations/weights.json"]

[[job]]
name = "exam"
after = "train"
notebook = "exam.ipynb"
parameters = { bonus = "{seed}" }
artefacts = ["evaluations/score.json"]

[[job]]
name = "compare"
gather = ["exam"]
kind = "summary"
notebook = "compare.ipynb"
parameters = { runs = "{runs}" }
artefacts = ["evaluations/compared.json"]
"""


@pytest.fixture
def small(project):
    "A project with a batch of five tasks; returns (project, settings, name and jobs)."
    notebook(project.root / "train.ipynb", [f"{HEAD}\nroot: str = ''  # project\nseed: int = 1  # seed", OPEN + WORK])
    notebook(project.root / "exam.ipynb", [f"{HEAD}\nbonus: int = 0  # points for nothing",
                                           OPEN + "run.save_evaluation('score', {'score': run.evaluation('weights')['value'] + bonus})"])
    notebook(project.root / "compare.ipynb", [f"{HEAD}\nruns: str = ''  # ids", OPEN + "scores = [Run.open(Path(run_dir).parent / name)"
                                              ".evaluation('score')['score'] for name in runs.split(',')]\n"
                                              "run.save_evaluation('compared', {'scores': scores})"])
    (project.root / "small.toml").write_text(FILE)
    return project, replace(project.settings(), workers=2), load_batch(project.root / "small.toml", project.root)


def run_it(settings, batch) -> dict:
    with pool(settings) as executor:
        return run_batch(*batch, settings, executor, say=lambda line: None)


def left(settings, outcomes) -> dict:
    "What the tasks left behind, by key: the evaluations of their runs."
    folders = {key: settings.runs / o.run / "evaluations" for key, o in outcomes.items()}
    return {key: {f.name: json.loads(f.read_text()) for f in sorted(folder.iterdir())} for key, folder in folders.items()}


def test_a_failure_skips_what_depends_on_it_and_a_rerun_does_the_rest(small):
    project, settings, batch = small
    (project.root / "broken").touch()
    first = run_it(settings, batch)
    assert {key: o.news for key, o in first.items()} == {
        "train[seed=1]": "done", "train[seed=2]": "failed", "exam[seed=1]": "done", "exam[seed=2]": "skipped", "compare": "skipped"}
    assert "the second seed is broken" in first["train[seed=2]"].error
    assert first["exam[seed=2]"].error == "train[seed=2] failed" and first["compare"].error == "exam[seed=2] was skipped"
    assert Run(settings.runs / first["train[seed=2]"].run).record["status"] == "failed"
    (project.root / "broken").unlink()
    second = run_it(settings, batch)
    assert {key: o.news for key, o in second.items()} == {
        "train[seed=1]": "up to date", "train[seed=2]": "done", "exam[seed=1]": "up to date", "exam[seed=2]": "done", "compare": "done"}
    assert left(settings, second)["compare"]["compared.json"] == {"scores": [11, 22]}
    (settings.runs / second["exam[seed=1]"].run / "evaluations" / "score.json").unlink()  # what is gone is made again
    third = run_it(settings, batch)
    assert [o.news for o in third.values()] == ["up to date", "up to date", "done", "up to date", "up to date"]
    assert len(records(settings)) == 4  # the failed training, both good ones, one comparison


@pytest.mark.parametrize("old, new, words", [
    ('after = "train"', 'after = "trian"', r"small\.toml, job exam: comes after 'trian' \(did you mean 'train'"),
    ("seed = [1, 2]", "seed = [1, 1]", r"job train: grid\.seed must be a list of different values"),
    ("seed = [1, 2]", 'seed = ["a", "b"]', r"job train: train\.ipynb: parameter seed = 'a' is not of type int"),
    ("seed = [1, 2]", "depth = [1, 2]", r"job train: train\.ipynb: unknown parameter 'depth'"),
    ('notebook = "exam.ipynb"', 'notebook = "ecam.ipynb"', r"job exam: ecam\.ipynb is not there"),
    ('kind = "summary"', 'knid = "summary"', r"job compare: unknown key 'knid' \(did you mean 'kind'"),
    ('gather = ["exam"]', 'after = "train"', r"job compare: follows train in the same run as exam"),
    ('name = "exam"', 'name = "train"', r"needs a name of its own"),
    ('name = "small"', "nmae = 1", r"unknown key 'nmae'"),
    ("[[job]]", "[[job", r"small\.toml: .*line 4"),
])
def test_mistakes_in_a_batch_file(small, old, new, words):
    project, *_ = small
    assert old in FILE
    (project.root / "small.toml").write_text(FILE.replace(old, new, 1))
    with pytest.raises(LabError, match=words):
        load_batch(project.root / "small.toml", project.root)


def test_a_job_with_a_grid_of_its_own_after_another_one():
    jobs = Job("train", "t", grid={"seed": [1, 2]}), Job("robust", "r", after="train", grid={"wind": [0, 5]})
    tasks = expand(jobs)
    assert [t.key for t in tasks[2:]] == [f"robust[seed={s}, wind={w}]" for s in (1, 2) for w in (0, 5)]
    assert all(t.home == t.key and t.needs == (f"train[seed={t.point['seed']}]",) for t in tasks[2:])


# ---- on a cluster

@pytest.fixture
def cluster(small):
    "A Dask scheduler and two workers, all processes of their own; yields (address, worker processes)."
    project, *_ = small
    file, environment, started = project.root / "scheduler.json", project.environment(), []

    def start(*words):
        log = open(project.root / f"dask-{len(started)}.log", "w")
        started.append(subprocess.Popen([sys.executable, "-m", "dask", *words], stdout=log, stderr=log, env=environment, cwd=project.root))
        return started[-1]
    try:
        start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
        until = time.monotonic() + 60
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        words = ("worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory")
        workers = [start(*words, str(project.root / f"w{i}")) for i in range(2)]
        with distributed.Client(address, timeout=60) as client:
            client.wait_for_workers(2, timeout=60)
        yield address, workers
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_cluster_does_the_same_and_survives_the_death_of_a_worker(small, cluster):
    project, settings, batch = small
    address, workers = cluster
    here = left(settings, run_it(settings, batch))
    there = replace(settings, scheduler=address, runs=project.root / "cluster" / "runs", reports=project.root / "cluster" / "reports")
    (project.root / "pause").touch()
    killed = []

    def assassin():
        "Kills the worker of seed 1 when both trainings are under way, and lets the other one go on."
        until = time.monotonic() + 90
        marks = [project.root / f"worker-{seed}" for seed in (1, 2)]
        while not all(m.exists() and m.read_text() for m in marks) and time.monotonic() < until:
            time.sleep(0.1)
        victim = int(marks[0].read_text())
        os.kill(victim, signal.SIGKILL)
        killed.append(victim)
        time.sleep(1)
        (project.root / "pause").unlink()

    threading.Thread(target=assassin, daemon=True).start()
    outcomes = run_it(there, batch)
    assert killed and killed[0] in [w.pid for w in workers] and sum(w.poll() is not None for w in workers) == 1
    assert {o.news for o in outcomes.values()} == {"done"}
    assert left(there, outcomes) == here
    statuses = sorted(r["status"] for r in records(there))
    assert statuses == ["crashed", "passed", "passed", "passed"], "the run of the dead worker says so"
    assert {o.news for o in run_it(there, batch).values()} == {"up to date"}


def test_a_scheduler_that_is_not_there(small):
    _, settings, batch = small
    with pytest.raises(LabError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:1"):
        run_it(replace(settings, scheduler="tcp://127.0.0.1:1"), batch)


# ---- the command

def test_the_command_with_a_gate_and_a_summary(project):
    (project.root / "nbs" / "stages" / "batch_summary.ipynb").write_bytes((ROOT / "nbs" / "stages" / "batch_summary.ipynb").read_bytes())
    (project.root / "data" / "batches").mkdir()
    file = project.root / "data" / "batches" / "hover.toml"
    text = (ROOT / "data" / "batches" / "hover_seeds.toml").read_text().split('[[job]]\nname = "review"')[0]
    text = text.replace(', "rlnb/tracker", "rlnb/lab"', "").replace(', "rlnb/tracker"', "")
    file.write_text(text.replace("1_000_000", "100").replace("[1, 2, 3]", "[1, 2]"))
    done = project.rlnb("batch", "data/batches/hover.toml", "--workers", "2")
    assert done.returncode == 0 and "4 done" in done.stdout, done.stdout + done.stderr
    found = {r["stage"]: r for r in records(project.settings())}
    assert found["hover"]["passed"] is True and found["batch_hover_seeds"]["status"] == "passed"
    summary = Run(project.settings().runs / found["batch_hover_seeds"]["id"]).evaluation("summary")
    assert len(summary["exams"]) == 2 and summary["text"] == "batch hover_seeds: 4 done"
    again = project.rlnb("batch", "data/batches/hover.toml")
    assert again.returncode == 0 and again.stdout.splitlines()[-1] == "4 up to date"
    missing = project.rlnb("batch", "nowhere.toml")
    assert missing.returncode == 1 and "there is no batch file nowhere.toml" in missing.stderr
