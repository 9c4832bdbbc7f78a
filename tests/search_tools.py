"""Objectives for the tests of the search. Run as a script: a controller that is started and killed over and over."""
import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path

from rlnb.lab.spaces import Objective, load_space

SPACE = """\
[study]
name = "toy"
objective = "search_tools:{objective}"
deadline = {deadline}

[parameters]
x = {{ low = -1.0, high = 1.0 }}
rate = {{ low = 1e-4, high = 1.0, log = true }}
"""


def height(params: dict) -> float:
    "A hill with its top, 0, at x = 0.3, rate = 0.01."
    return -(params["x"] - 0.3) ** 2 - (math.log10(params["rate"]) + 2) ** 2


def hill(params: dict, seed: int, folder: Path) -> dict:
    (folder / "model.zip").write_text(json.dumps(params))
    return {"mean_reward": height(params), "std_reward": 0.0, "model": "model.zip"}


FAULTS = ("ok", "nan", "raises", "dies", "hangs", "infinite", "no model", "no reward", "named")  # by trial number; all later ones are fine


def faulty(params: dict, seed: int, folder: Path) -> dict:
    "Goes wrong in another way in each of the first trials, always with a reward that would win."
    fault = FAULTS[seed - 1] if seed <= len(FAULTS) else "ok"
    if fault == "raises":
        raise RuntimeError("the wheel came off")
    if fault == "named":
        error = ValueError("no simulator")
        error.status = "no_simulator"
        raise error
    if fault == "dies":
        os._exit(7)
    if fault == "hangs":
        time.sleep(3600)
    reward = {"nan": math.nan, "infinite": math.inf, "no model": 1e9, "no reward": "1e9"}.get(fault, height(params))
    if fault != "no model":
        (folder / "model.zip").write_text(fault)
    return {"mean_reward": reward, "model": "model.zip"}


def slow(params: dict, seed: int, folder: Path) -> dict:
    time.sleep(3600)


DEFAULTS = {"x": 0.0, "rate": 0.1, "word": "a"}
HILL, FAULTY, SLOW = (Objective(trial, lambda: DEFAULTS, "height", "a hill") for trial in (hill, faulty, slow))


def write_space(folder: Path, objective: str = "HILL", deadline: float = 60) -> Path:
    "A space file in a folder."
    path = folder / "toy.toml"
    path.write_text(SPACE.format(objective=objective, deadline=deadline))
    return path


def killed_over_and_over(folder: Path, times: int) -> None:
    """Starts a controller and kills it with SIGKILL at a random moment, `times` times; prints the results file's trial numbers after each.

    The controllers are forked from a process that has everything imported, so that the kills hit the work and not the imports."""
    import optuna  # noqa: F401
    import torch

    from rlnb.car.champion import ChampionTracker
    from rlnb.lab.search import Study, search

    torch.set_num_threads(1)
    quiet = lambda line: None  # noqa: E731
    study = Study(load_space(write_space(folder)), folder / "study", 1, 3, ChampionTracker(folder / "study", quiet).update_if_better, quiet)
    moments = random.Random(6)
    for _ in range(times):
        controller = os.fork()
        if not controller:
            search(study, 10**6)
            os._exit(0)
        time.sleep(moments.uniform(0.05, 2.2))
        os.kill(controller, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(controller, 0)[1]), "the controller ended before it was killed"
        print(json.dumps([row["trial"] for row in study.results()]), flush=True)
    done = sum(row["status"] != "abandoned" for row in study.results())
    search(study, done + 1)


if __name__ == "__main__":
    killed_over_and_over(Path(sys.argv[1]), int(sys.argv[2]))
