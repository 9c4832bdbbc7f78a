"""Fixtures: a small project of its own in a temporary folder, with stage notebooks that keep the real contract but need no physics."""
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

ROOT = Path(__file__).resolve().parent.parent

# A loaded machine is slow, not wrong: what counts is the property.
hypothesis_settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("patient")

# Keeps the contract of nbs/stages/tracker_train.ipynb: resumes from its newest checkpoint, logs, writes best.json.
TRAIN = ("""\
run_dir: str = ""  # run folder
stage: str = "hover"  # stage to train for
seed: int = 1  # seed of the training
timesteps: int = 100  # total environment steps to reach
checkpoint: str = ""  # folder to start from; empty: from nothing
resume: bool = False  # go on from this run's newest checkpoint
root: str = ""  # the project's folder""", """\
import json, os, time
from pathlib import Path
from rlnb.lab.runs import Run
from rlnb.lab.settings import load_settings
settings = load_settings(root)
pace = float(os.environ.get("TEST_PACE", "0"))  # seconds a chunk, for tests that need time to interrupt
run = Run.open(run_dir, writer=True)
run.save_evaluation("settings", {"seed": settings.seed, "wandb_mode": settings.wandb_mode})""", """\
chunk = timesteps // 10
done = max([int(p.name) for p in run.checkpoints.iterdir()], default=0) if resume else 0
first = done
while done < timesteps:
    done = min(done + chunk, timesteps)
    run.log(done, total_steps=timesteps, steps_per_s=1e5, position_error=1e4 / done)
    (run.checkpoints / str(done)).mkdir(exist_ok=True)
    (run.checkpoints / str(done) / "weights.json").write_text(json.dumps({"stage": stage, "seed": seed, "step": done}))
    time.sleep(pace)""", """\
run.save_evaluation("best", {"checkpoint": f"checkpoints/{done}", "step": done})
run.save_evaluation("milestones", {"first": first, "last": done})
print(f"trained {stage} from {first} to {done}")""")

# Keeps the contract of nbs/stages/tracker_exam.ipynb: reads the checkpoint from disk, writes exam.json.
EXAM = ("""\
run_dir: str = ""  # run folder
stage: str = "hover"  # stage to examine
checkpoint: str = ""  # folder of the policy
root: str = ""  # the project's folder""", """\
import json
from pathlib import Path
import matplotlib.pyplot as plt
from rlnb.lab.gates import check, load_gates
from rlnb.lab.packets import figure, reader_note, status_header
from rlnb.lab.runs import Run
from rlnb.lab.settings import load_settings
settings, run = load_settings(root), Run.open(run_dir, writer=True)
weights = json.loads((Path(checkpoint) / "weights.json").read_text())
gates = load_gates(settings.gates)""", """\
needed = json.loads((Path(root) / "needed_steps.json").read_text()).get(stage, 0)
good = weights["step"] >= needed
metrics = {"episodes": 20, "from_checkpoint": True, "finite": True}
for limit in gates[stage].passing + gates[stage].gold:
    metrics[limit.metric] = limit.value if good else 99.0
run.save_evaluation("exam", {"metrics": metrics, "checkpoint": checkpoint})""", """\
verdict = check(gates, stage, metrics)
fig, ax = plt.subplots(figsize=(5, 3))
curve = run.metrics()
ax.loglog(curve.step, 100 * curve.position_error)
ax.set(xlabel="environment steps", ylabel="position error (cm)")
figure(fig, f"Learning curve of {stage}: the position error falls as training goes on", thumbnail=True)""",
        "status_header(run.record, verdict, metrics)", "reader_note(verdict, metrics, settings.reader_language)")


# Keeps the contract of nbs/stages/tracker_review.ipynb: reads the verdict, writes review.json.
REVIEW = ("""\
run_dir: str = ""  # run folder
stage: str = "hover"  # stage of the run
root: str = ""  # the project's folder""", """\
from rlnb.lab.runs import Run
run = Run.open(run_dir, writer=True)
verdict = run.evaluation("verdict")
because = f"{len(verdict['reasons'])} limits are not met"
run.save_evaluation("review", {"decision": "continue_same_stage_more_steps", "because": because})""")


def notebook(path: Path, cells, title: str = "Stage") -> Path:
    "Writes a notebook whose first code cell holds the parameters."
    code = [nbformat.v4.new_code_cell(source) for source in cells]
    code[0].metadata["tags"] = ["parameters"]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"# {title}"), *code]), path)
    return path


def heed_interrupts() -> None:
    "A shell that runs the tests in the background makes its children ignore Ctrl-C; a terminal would not."
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Project:
    "A project folder with its own settings, gates and stage notebooks."

    def __init__(self, root: Path):
        self.root = root
        (root / "data").mkdir(parents=True)
        text = (ROOT / "settings.ini").read_text()
        (root / "settings.ini").write_text(re.sub(r"wandb_mode = \w+", "wandb_mode = disabled", text))
        shutil.copy(ROOT / "data" / "gates.toml", root / "data" / "gates.toml")
        notebook(root / "nbs" / "stages" / "tracker_train.ipynb", TRAIN, "Training")
        notebook(root / "nbs" / "stages" / "tracker_exam.ipynb", EXAM, "Exam")
        notebook(root / "nbs" / "stages" / "tracker_review.ipynb", REVIEW, "Review")
        (root / "needed_steps.json").write_text("{}")

    def environment(self, **extra) -> dict:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("RLNB_", "_RLNB"))}
        return {**clean, "PYTHONPATH": str(ROOT), **extra}

    def rlnb(self, *arguments, **extra) -> subprocess.CompletedProcess:
        "Runs the command line in this project, to its end."
        return subprocess.run([sys.executable, "-m", "rlnb.cli", *map(str, arguments)], cwd=self.root, env=self.environment(**extra),
                              capture_output=True, text=True, timeout=120)

    def start(self, *arguments, **extra) -> subprocess.Popen:
        "Starts the command line in this project, in a process group of its own like a terminal's job."
        return subprocess.Popen([sys.executable, "-m", "rlnb.cli", *map(str, arguments)], cwd=self.root, env=self.environment(**extra),
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                                preexec_fn=heed_interrupts)

    def settings(self):
        from rlnb.lab.settings import load_settings

        return load_settings(self.root, env={})

    def records(self) -> list[dict]:
        from rlnb.lab.runs import records

        return records(self.settings())

    def edit(self, path: str, before: str, after: str) -> None:
        "One change in a file of the project."
        text = (self.root / path).read_text()
        assert before in text, f"{before!r} is not in {path}"
        (self.root / path).write_text(text.replace(before, after, 1))


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path / "project")
