"""`rlnb car trial` from end to end: both stage notebooks in a real kernel, a run, a verdict, packets and a page."""
import json
import os
import subprocess
import sys

import car_tools

car_tools.need_car_extra()


def test_a_recorded_trial(tmp_path):
    folders = {"RLNB_RUNS": "runs", "RLNB_REPORTS": "reports", "RLNB_STATE": "state.json"}
    env = {**os.environ, **{k: str(tmp_path / v) for k, v in folders.items()}, "RLNB_WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rlnb.cli.main", "car", "trial", "--scene", "waveshare", "--timesteps", "2048", "--episodes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 2, done.stdout + done.stderr  # two thousand decisions are not enough: the gate says so
    assert "car_drive: not passed" in done.stdout and "only 2 episodes, at least 10 are needed" in done.stdout
    (run,) = (tmp_path / "runs").glob("car_drive-*")
    record, exam = (json.loads((run / name).read_text()) for name in ("run.json", "evaluations/exam.json"))
    assert record["status"] == "failed" and record["kind"] == "car" and "data/car/defaults.toml" in record["config_hashes"]
    assert exam["simulator"] == "stand-in" and exam["pure_pursuit"]["clean"] == 1.0 and exam["metrics"]["episodes"] == 2
    assert (run / "checkpoints" / "best" / "model.zip").exists() and (run / "evaluations" / "drives.npz").exists()
    for name in ("car_trial", "car_exam"):
        assert (tmp_path / "reports" / "packets" / run.name / f"{name}.ipynb").exists()
        page = (tmp_path / "reports" / "site" / "packets" / run.name / f"{name}.html").read_text()
        assert "<img" in page and "stand-in" in page and "Traceback" not in page
