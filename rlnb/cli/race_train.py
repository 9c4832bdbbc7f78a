"""Training for the race: one notebook, one run."""
from pathlib import Path

from rlnb.cli.ladder import Job, Rung, Terminal, address, below, closing, named, near, notebook, progress
from rlnb.lab.errors import LabError
from rlnb.lab.gates import load_gates
from rlnb.lab.runs import Run
from rlnb.lab.settings import Settings

STAGE, NOTEBOOK = "race_references", "race_train"


def race_train(settings: Settings, options) -> int:
    "Trains the ladder's tracker on recorded references, says how well it follows and where everything is; returns 0."
    from rlnb.race.training import RaceRecipe

    if not 0 < options.effort <= 1:
        raise LabError(f"--effort {options.effort}: a share of the usual steps, above 0 and at most 1")
    job = Job(settings, load_gates(settings.gates), Terminal(), verbose=options.verbose)
    parent, rung = tracker(job, options.checkpoint)
    run = Run.create(settings, STAGE, {"seed": settings.seed, "checkpoint": near(parent, settings.root), "effort": options.effort}, settings.seed,
                     rung.run.id if rung else None, kind="tracker")
    total = sum(int(options.effort * leg.steps) for leg in RaceRecipe().legs)
    with closing(run):
        run.start()
        job.say(f"{STAGE}: recording references, then training to {total:,} steps from {near(parent, settings.root)}, run {run.id}")
        bar = progress(STAGE, total, job.say)
        try:
            notebook(job, run, NOTEBOOK, {"checkpoint": str(parent), "seed": settings.seed, "effort": options.effort}, ["evaluations/best.json"], bar.rows)
        finally:
            bar.close()
        run.finish("passed")
    _report(job, run)
    return 0


def tracker(job: Job, checkpoint: str | None, stage: str = "planner_integration_smoke") -> tuple[Path, Rung | None]:
    "The checkpoint to go on with, and the rung that it comes from if none was named: the one below `stage`."
    if given := named(checkpoint):
        return given, None
    rung = below(job, job.gates[stage])
    if rung is None or rung.checkpoint is None:
        raise LabError(f"{stage} names no stage whose tracker it flies: give one with --checkpoint")
    return rung.checkpoint, rung


def _report(job: Job, run: Run) -> None:
    from rlnb.lab.packets import table
    from rlnb.lab.site import publish

    rows = [(f"{e['step']:,}", f"{100 * e['crash_rate']:.0f} %", f"{100 * e['position_error']:.1f}", f"{100 * e['position_error_p95']:.1f}")
            for e in run.evaluation("reference_exam")]
    job.say(f"\n{table(('step', 'crashes', 'median (cm)', 'p95 (cm)'), rows)}\n")
    job.say(f"checkpoint: {near(run.best_checkpoint(), Path.cwd())}\n{address(publish(job.settings))}")
