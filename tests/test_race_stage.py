"""The smoke and the race from the command line: real notebooks, few steps, a hash that is really looked at."""
import json
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from rlnb.lab.gates import check, load_gates
from rlnb.lab.notebooks import execute
from rlnb.lab.runs import Run
from rlnb.race.flights import load_races

STAGE = "planner_integration_smoke"


@pytest.fixture
def real(project):
    "A project with the race's notebooks, its level and a compilation cache that the tests share."
    for name in ("planner_smoke", "race"):
        shutil.copy(ROOT / "nbs" / "stages" / f"{name}.ipynb", project.root / "nbs" / "stages" / f"{name}.ipynb")
    shutil.copy(ROOT / "data" / "level3.toml", project.root / "data" / "level3.toml")
    cache = ROOT / "data" / "cache" / "tests"
    cache.mkdir(parents=True, exist_ok=True)
    (project.root / "data" / "cache").symlink_to(cache, target_is_directory=True)
    return project


def smoked(real, name: str, **parameters) -> tuple[Run, dict]:
    "The run and the metrics of a short smoke of two development seeds."
    settings = real.settings()
    run = Run.create(settings, STAGE, {}, [5010, 5011], kind="race")
    run.start()
    execute(settings.root / "nbs" / "stages" / "planner_smoke.ipynb", settings.packets / run.id / f"{name}.ipynb",
            {"run_dir": run.folder, "root": settings.root, "seeds": "5010,5011", "checkpoint": "pd", "steps": 30, **parameters},
            run=run, settings=settings, artefacts=["evaluations/exam.json", "evaluations/races.npz"])
    run.finish("failed", "a test")
    return run, run.evaluation("exam")["metrics"]


def test_one_digit_in_a_copy_of_the_level_fails_the_smoke(real):
    run, clean = smoked(real, "clean")
    text = (real.root / "data" / "level3.toml").read_text()
    assert "sensing_range = 0.7" in text
    copy = real.root / "data" / "copy.toml"
    copy.write_text(text.replace("sensing_range = 0.7", "sensing_range = 0.8"))
    _, dirty = smoked(real, "dirty", level=str(copy), second=str(run.folder / "evaluations" / "races.npz"))
    assert clean["config_hash_clean"] is True and dirty["config_hash_clean"] is False
    assert clean["finite"] is True and clean["episodes"] == 2 and clean["from_checkpoint"] is False
    flights = load_races(run.folder / "evaluations" / "races.npz")
    assert flights.seeds.tolist() == [5010, 5011] and flights.position.shape[0] == 31 and run.evaluation("exam")["replay_deviation"] == 0
    gates = load_gates(real.settings().gates)
    best = dirty | {"first_gate_progress_rate": 1.0, "gate0_passes": 20, "early_termination_rate": 0.0, "episodes": 20,
                    "from_checkpoint": True}
    passed = {"stage": "reference_command_no_gate_reward", "status": "passed"}
    verdict = check(gates, STAGE, best, [passed], require_prerequisites=True)
    assert not verdict.passed and len(verdict.reasons) == 1 and "config_hash_clean" in verdict.reasons[0]
    assert check(gates, STAGE, best | {"config_hash_clean": True}, [passed], require_prerequisites=True).passed


def test_a_short_race_prints_its_table_and_its_packet(real):
    process = real.start("race", "--planner", "slow", "--seeds", "5010,5011", "--pilot", "pd", "--steps", "30")
    shown, complaints = process.communicate(timeout=900)  # it compiles the race and draws an animation
    assert process.returncode == 0, complaints
    assert "0 / 2" in shown and "flying 2" in shown and "race.ipynb" in shown and "site:" in shown
    record = real.records()[-1]
    assert record["kind"] == "race" and record["status"] == "passed" and record["seeds"] == [5010, 5011]
    assert record["parameters"]["checkpoint"] == "pd"
    stored = json.loads((real.root / "data" / "runs" / record["id"] / "evaluations" / "race.json").read_text())
    assert stored["metrics"]["races"] == 2 and stored["replay_deviation"] == 0 and stored["taxonomy"] == {"flying": 2}


@pytest.mark.parametrize("arguments, words", [
    (("race", "--seeds", "5010"), "is locked: reference_command_no_gate_reward has not passed"),
    (("race", "--pilot", "pd", "--checkpoint", "x"), "exclude each other"),
    (("race", "--pilot", "pd", "--style", "fast"), "is for --planner racing"),
    (("race", "--pilot", "pd", "--seeds", "9-3"), "no range of seeds"),
    (("race", "--checkpoint", "nowhere"), "there is no such folder"),
    (("stage", STAGE), "is locked: reference_command_no_gate_reward has not passed"),
    (("stage", STAGE, "--timesteps", "10"), "trains nothing")])
def test_what_cannot_be_flown_is_one_line(real, arguments, words):
    result = real.rlnb(*arguments)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert result.returncode == 1 and len(lines) == 1 and words in lines[0], result.stderr
    assert real.records() == []


def test_help_names_the_race():
    words = [sys.executable, "-m", "rlnb.cli", "race", "--help"]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout
    for word in ("--planner", "--seeds", "--checkpoint", "--nominal", "--bounds", "--pilot"):
        assert word in shown
