"""What can be searched: one trial of each wing, as a function of its parameters. Torch and JAX are imported only by the trial's own process."""
import shutil
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from rlnb.lab.settings import find_root, load_settings
from rlnb.lab.spaces import Objective

# ---- the car

JUDGED = 75.0  # s, what the judge of rlnb.car.runner allows for two laps


def car_defaults() -> dict:
    "The recorded defaults of `rlnb car train`, both agents' settings in one dict."
    data = tomllib.loads((find_root() / "data" / "car" / "defaults.toml").read_text())
    return {**data["dqn"], **data["ppo"], **data["vision"], **data["train"]}


def laps_per_minute(drives: list[dict]) -> list[float]:
    """One figure per drive, whatever the policy was paid for: signed progress per minute, times the share of time on the road.

    A drive that ends early without its laps is charged the judge's whole time: crashing fast must not look like driving fast."""
    return [60 * d["inside"] * d["progress"] / (d["seconds"] if d["end"] == "laps" else JUDGED) for d in drives]


def car_trial(params: dict, seed: int, folder: Path) -> dict:
    "Trains and judges a car; a setting of the agent that is not searched in this trial is left out."
    from rlnb.car.runner import load_config, train

    data = tomllib.loads((find_root() / "data" / "car" / "defaults.toml").read_text())
    agent = params.get("agent", data["train"]["agent"])
    other = set(data[{"ppo": "dqn", "dqn": "ppo"}[agent]]) - set(data[agent])
    config = load_config(**{k: v for k, v in params.items() if k not in other}, seed=seed, simulator="stand-in")
    result = train(config, folder / "car", log=lambda line: print(line, flush=True))
    speeds = laps_per_minute(result["drives"])
    return {"mean_reward": float(np.mean(speeds)), "std_reward": float(np.std(speeds)), "model": "car/model.zip",
            "figures": {k: v for k, v in result["score"].items() if k != "ends"}}


CAR = Objective(car_trial, car_defaults, "laps per minute on the road",
                "Training in the stand-in simulator, then ten drives of two laps, judged over the wire. A drive that ends early is charged the whole 75 s.")


# ---- the tracker

STAGE = "hover"  # learnt from new weights in the time of a trial; no later rung is
DRONES = 256  # a quarter of the usual number: a short trial needs updates more than it needs large batches
BLOCKS = 5  # the validation seeds, split to see how far the score depends on them


def tracker_defaults() -> dict:
    "PPO's recorded settings, and the environment steps of a trial."
    import rlnb.tracker  # noqa: F401  first: it sets the flag that crazyflow wants before Brax imports SciPy
    from rlnb.tracker.ppo import PPOConfig

    return {k: v for k, v in asdict(PPOConfig()).items() if isinstance(v, (int, float))} | {"timesteps": 393_216}


def tracker_trial(params: dict, seed: int, folder: Path) -> dict:
    "Trains a tracker from nothing and examines it on the validation seeds."
    import rlnb.tracker  # noqa: F401  first, as above
    from rlnb.tracker.checkpoints import load_policy
    from rlnb.tracker.exams import measure
    from rlnb.tracker.ppo import PPOConfig
    from rlnb.tracker.recipes import find_recipe
    from rlnb.tracker.training import Schedule, StageTask, Trainer, train_stage, use_compilation_cache

    suite = load_settings()
    use_compilation_cache(suite.cache / "jax")
    seeds = suite.validation_seeds
    settings = {**tracker_defaults(), **params}
    steps = settings.pop("timesteps")
    ppo, rate = replace(PPOConfig(), **settings), settings["learning_rate"]
    trainer = Trainer(find_recipe("default").environment(num_envs=DRONES), ppo, updates=8, episodes=len(seeds))
    task = StageTask(STAGE, folder / "checkpoints", steps, steps, seed, validation_seeds=seeds, schedule=Schedule(rate, rate))
    best = train_stage(trainer, task, judge=lambda metrics: (False, False), log=lambda step, row: print(step, row, flush=True)).best
    flights = trainer.examiner.fly(load_policy(Path(best.checkpoint), trainer.learner)[0], STAGE, seeds)
    parts = [measure(_part(flights, block), STAGE)["balanced_score"] for block in np.array_split(np.arange(len(seeds)), BLOCKS)]
    shutil.make_archive(str(folder / "model"), "zip", best.checkpoint)
    names = ("position_error", "cross_track", "velocity_error", "action_delta", "crash_rate", "success_rate")
    return {"mean_reward": best.metrics["balanced_score"], "std_reward": float(np.std(parts)), "model": "model.zip",
            "figures": {name: best.metrics[name] for name in names}}


def _part(flights, rows):
    "Some of the recorded flights."
    arrays = {name: value[rows] for name, value in vars(flights).items() if isinstance(value, np.ndarray)}
    return replace(flights, **arrays, seeds=tuple(flights.seeds[i] for i in rows))


TRACKER = Objective(tracker_trial, tracker_defaults, "balanced score on the validation seeds",
                    "Training from new weights on the first rung's commands with 256 drones, then its exam under the validation seeds. The exam's own seeds are never used.")
