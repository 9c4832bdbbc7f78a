"""Races: a block of seeds under a planner, and the last rung of the ladder, which needs no training."""
from pathlib import Path

from rlnb.cli.ladder import Job, Rung, Terminal, address, closing, conclude, near, notebook, packet
from rlnb.cli.race_train import STAGE as RACE_TRAINING
from rlnb.cli.race_train import tracker
from rlnb.lab.errors import LabError
from rlnb.lab.gates import check, load_gates
from rlnb.lab.runs import Run, records
from rlnb.lab.settings import Settings, read_seeds

RACE, SMOKE = "race", "planner_smoke"
EXAM_SEEDS = "101-120"


def add_race_options(sub) -> None:
    "Options of `rlnb race`."
    sub.add_argument("--level", default="3", metavar="L", help="number of a level, 0 to 3, or the path of its file (default: 3)")
    sub.add_argument("--planner", default="slow", choices=["slow", "racing"], help="who says what to fly (default: slow)")
    sub.add_argument("--style", default="", metavar="NAME", help="how the racing planner flies: steady, brisk, fast or fastest (default: steady)")
    sub.add_argument("--seeds", default=EXAM_SEEDS, help=f"courses to fly, such as 101-120 or 5000,5003 (default: {EXAM_SEEDS})")
    sub.add_argument("--checkpoint", metavar="C", help="tracker to fly with (default: for racing the newest of `rlnb race-train`, else the ladder's)")
    sub.add_argument("--pilot", choices=["pd"], help="fly with the hand-written pilot instead of a tracker")
    sub.add_argument("--steps", type=int, default=0, metavar="N", help="control steps of 20 ms at most (default: the level's)")
    sub.add_argument("--nominal", default="layout", choices=["layout", "file"], help="poses known before they are sensed: the surveyed layout, or the file's zeros")
    sub.add_argument("--bounds", default="file", choices=["file", "upstream"], help="arena that ends a flight: the file's, or the wider one of the public course")
    sub.add_argument("--verbose", action="store_true", help="show what the notebook prints")


def race(settings: Settings, options) -> int:
    "Flies a block of races, prints its table and where its packet is; returns 0."
    seeds = read_seeds(options.seeds)
    if options.steps < 0:
        raise LabError(f"--steps {options.steps}: a race lasts at least one step")
    if options.pilot and options.checkpoint:
        raise LabError("--pilot pd and --checkpoint exclude each other: one pilot flies")
    if options.style and options.planner == "slow":
        raise LabError(f"--style {options.style} is for --planner racing; the slow planner has none")
    job = Job(settings, load_gates(settings.gates), Terminal(), verbose=options.verbose)
    checkpoint = "pd" if options.pilot else str(_trained_for_race(job, options) or tracker(job, options.checkpoint)[0])
    said = {"planner": options.planner, "style": options.style, "level": options.level, "seeds": options.seeds, "steps": options.steps,
            "nominal": options.nominal, "bounds": options.bounds}
    shown = checkpoint if checkpoint == "pd" else near(Path(checkpoint), settings.root)
    run = Run.create(settings, RACE, said | {"checkpoint": shown}, seeds, kind=RACE)
    with closing(run):
        run.start()
        job.say.wait(f"race: {len(seeds)} seeds, {options.planner}, {shown} ...")
        notebook(job, run, RACE, said | {"checkpoint": checkpoint}, ["evaluations/race.json", "evaluations/races.npz"])
        run.finish("passed")
    _report(job, run)
    return 0


def smoke(settings: Settings, stage: str, checkpoint: str | None = None, verbose: bool = False) -> int:
    "The stage that flies a planner over the tracker of the stage before; returns 0 if its gate is passed, 2 if not."
    job = Job(settings, load_gates(settings.gates), Terminal(), verbose=verbose)
    chosen, parent = tracker(job, checkpoint, stage)
    seeds = read_seeds(EXAM_SEEDS)
    run = Run.create(settings, stage, {"planner": "slow", "seeds": EXAM_SEEDS, "checkpoint": near(chosen, settings.root)}, seeds,
                     parent.run.id if parent else None, kind=RACE, configs=[settings.root / "data" / "level3.toml"])
    try:
        with closing(run):
            run.start()
            job.say.wait(f"{stage}: flying {len(seeds)} seeds ...")
            notebook(job, run, SMOKE, {"stage": stage, "planner": "slow", "seeds": EXAM_SEEDS, "checkpoint": str(chosen)},
                     ["evaluations/exam.json", "evaluations/races.npz"])
            history = [{"stage": r["stage"], "status": r["status"]} for r in records(settings)]
            verdict = check(job.gates, stage, run.evaluation("exam")["metrics"], history, require_prerequisites=True)
            run.save_evaluation("verdict", verdict.to_dict())
            run.finish("passed" if verdict.passed else "failed", None if verdict.passed else f"gate: {'; '.join(verdict.reasons)}")
        job.say(f"{stage}: {'passed' if verdict.passed else 'NOT passed: ' + '; '.join(verdict.reasons)}")
        job.rungs.append(Rung(stage, run, verdict, "examined", chosen))
    finally:
        conclude(job)
    return 0 if verdict.passed else 2


def _trained_for_race(job: Job, options) -> Path | None:
    "The newest tracker of `rlnb race-train` under this seed, if the racing planner flies and none is named."
    if options.planner == "racing" and not options.checkpoint:
        for record in reversed(records(job.settings)):
            if (record["stage"], record["status"], record["parameters"].get("seed")) == (RACE_TRAINING, "passed", job.settings.seed):
                return Run.open(job.settings.runs / record["id"]).best_checkpoint()
        job.say("no tracker has been trained for the race ('rlnb race-train'): the ladder's flies, and will not keep up")
    return None


def _report(job: Job, run: Run) -> None:
    "Prints the block's table and where to read on."
    from rlnb.lab.packets import table
    from rlnb.lab.site import publish

    found = run.evaluation("race")
    rows = [(name, f"{m['finished']} / {m['feasible']}", f"{m['success_rate']:.1%}", f"{m['success_low']:.1%} to {m['success_high']:.1%}", f"{m['mean_time']:.2f} s" if m["finished"] else "-")
            for name, m in (("this pilot", found["metrics"]), ("hand-written pilot", found["baseline"])) if m]
    job.say(f"\n{table(('', 'finished / feasible', 'success', '95 % interval', 'mean time'), rows)}\n")
    job.say(f"ended: {', '.join(f'{name} {count}' for name, count in found['taxonomy'].items())}")
    job.say(f"packet: {near(packet(job, run, RACE), Path.cwd())}\n{address(publish(job.settings))}")
