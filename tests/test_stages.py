"""The real stage notebooks through papermill and the command line: a tiny stage, and everything that can be wrong with a checkpoint."""
import json
import os
import shutil
import signal
import time
from dataclasses import asdict

import jax
import nbformat
import pytest
from conftest import ROOT

from rlnb.lab.notebooks import execute
from rlnb.lab.packets import external
from rlnb.lab.runs import Run
from rlnb.lab.site import publish
from rlnb.tracker.checkpoints import Metadata, save_checkpoint
from rlnb.tracker.environment import TrackerConfig, TrackerEnv
from rlnb.tracker.ppo import make_train


@pytest.fixture
def real(project):
    "A project with the real stage notebooks and a compilation cache that the tests share."
    for name in ("tracker_train", "tracker_exam", "tracker_review"):
        shutil.copy(ROOT / "nbs" / "stages" / f"{name}.ipynb", project.root / "nbs" / "stages" / f"{name}.ipynb")
    cache = ROOT / "data" / "cache" / "tests"
    cache.mkdir(parents=True, exist_ok=True)
    (project.root / "data" / "cache").symlink_to(cache, target_is_directory=True)
    return project


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    "A checkpoint of an untrained policy."
    env = TrackerEnv(TrackerConfig(num_envs=2, pool_rows=2))
    learner, init, _ = make_train(env, updates=1)
    about = Metadata(step=0, stage="hover", seed=0, ppo=asdict(learner.config), reward_weights=asdict(env.config.weights))
    return save_checkpoint(tmp_path_factory.mktemp("policy") / "0", init(jax.random.key(0)), about)


def test_a_tiny_stage_from_training_to_published_packet(real):
    settings = real.settings()
    run = Run.create(settings, "hover", {"timesteps": 8192}, 3)
    run.start()
    folder = settings.packets / run.id
    notebooks = settings.root / "nbs" / "stages"
    execute(notebooks / "tracker_train.ipynb", folder / "tracker_train.ipynb",
            {"run_dir": run.folder, "root": settings.root, "stage": "hover", "seed": 3, "timesteps": 8192, "num_envs": 64, "updates": 2},
            run=run, settings=settings, artefacts=["evaluations/best.json", "evaluations/milestones.json"])
    log = run.metrics()
    assert len(log) == 4 and log.step.tolist() == [2048, 4096, 6144, 8192] and log.log_prob_error.max() < 1e-5
    assert run.best_checkpoint() and run.best_checkpoint().name == "8192"
    execute(notebooks / "tracker_exam.ipynb", folder / "tracker_exam.ipynb",
            {"run_dir": run.folder, "root": settings.root, "stage": "hover", "checkpoint": run.best_checkpoint()},
            run=run, settings=settings, artefacts=["evaluations/exam.json", "evaluations/flights.npz"])
    exam = run.evaluation("exam")
    assert exam["metrics"]["episodes"] == 20 and exam["metrics"]["from_checkpoint"] is True and exam["metrics"]["success_rate"] < 0.5
    run.finish("failed", "gate: of course")
    publish(settings)
    for name in ("tracker_train", "tracker_exam"):
        page = next(settings.site.rglob(f"*{name}*.html")).read_text()
        assert not external(page) and "alt=" in page
    words = json.dumps(nbformat.read(folder / "tracker_exam.ipynb", 4))
    assert "NOT passed" in words or "not passed" in words


def complaint(result) -> str:
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert result.returncode == 1 and len(lines) == 1 and lines[0].startswith("rlnb: error: "), result.stderr
    return lines[0]


def test_checkpoints_that_cannot_be_used_are_named_in_one_line(real, checkpoint, tmp_path):
    cut = shutil.copytree(checkpoint, tmp_path / "cut")
    victim = max((f for f in (cut / "state").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    other = shutil.copytree(checkpoint, tmp_path / "other")
    about = json.loads((other / "metadata.json").read_text())
    (other / "metadata.json").write_text(json.dumps(about | {"layout": "level3_reference_tracker_v1"}))
    assert "there is no such folder" in complaint(real.rlnb("stage", "hover", "--checkpoint", tmp_path / "none"))
    line = complaint(real.rlnb("stage", "hover", "--checkpoint", cut))
    assert "checkpoint cut is damaged" in line and "use an earlier one" in line
    line = complaint(real.rlnb("stage", "hover", "--checkpoint", other))
    assert "level3_reference_tracker_v1" in line and "level3_reference_tracker_command_v3" in line
    assert [r["status"] for r in real.records()] == ["failed", "failed"] and all("checkpoint" in r["error"] for r in real.records())


def test_ctrl_c_in_real_training_keeps_the_run(real):
    process = real.start("stage", "hover", "--timesteps", "50000000")
    try:
        ends = time.monotonic() + 240
        while time.monotonic() < ends and process.poll() is None:
            records = real.records()
            if records and len(Run.open(real.settings().runs / records[0]["id"]).metrics()) >= 8:
                break
            time.sleep(0.3)
        assert process.poll() is None, process.communicate()[1]
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130 and len(errors.strip().splitlines()) == 1
    record = real.records()[0]
    assert record["status"] == "interrupted" and record["error"]
    run = Run.open(real.settings().runs / record["id"])
    assert len(run.metrics()) >= 8 and run.last_step() >= 262_144
    assert all((path / "metadata.json").exists() for path in run.checkpoints.iterdir() if path.name.isdigit())
