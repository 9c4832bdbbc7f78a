"""Qualification: the whole ladder under several seeds, because one seed that passes may be luck."""
from dataclasses import replace

from rlnb.cli.ladder import climbed
from rlnb.lab.errors import LabError
from rlnb.lab.gates import load_gates
from rlnb.lab.runs import Run
from rlnb.lab.settings import Settings, show_seeds

SUMMARY = "sweep_summary"


def qualify(settings: Settings, seeds, until: str | None = None, fresh: bool = False, verbose: bool = False) -> int:
    "Climbs the ladder once per seed and summarises; returns 0 when every seed passed every stage, 2 when not."
    if not seeds:
        raise LabError("qualify needs at least one seed: --seeds 1-3")
    runs, wanted = [], [s.name for s in load_gates(settings.gates).ladder("tracker")]
    wanted = wanted[:wanted.index(until) + 1] if until in wanted else wanted
    complete = True
    for seed in seeds:
        print(f"\n== seed {seed} ==", flush=True)
        rungs = climbed(replace(settings, seed=seed), until=until, fresh=fresh, verbose=verbose)
        complete &= [r.stage for r in rungs if r.verdict.passed] == wanted
        runs += [r.run.id for r in rungs]
    summarise(settings, runs, seeds)
    return 0 if complete else 2


def generalist(settings: Settings, timesteps: int = 4_000_000) -> int:
    "Trains one policy on all families alike and examines it on every rung; returns 0 when all passed, 2 when not."
    from rlnb.cli.ladder import progress
    from rlnb.lab.notebooks import execute
    from rlnb.lab.site import publish

    run = Run.create(settings, "generalist", {"timesteps": timesteps, "seed": settings.seed}, settings.seed)
    run.start()
    bar = progress("generalist", timesteps, print)
    try:
        execute(settings.root / "nbs" / "stages" / "generalist.ipynb", settings.packets / run.id / "generalist.ipynb",
                {"run_dir": str(run.folder), "root": str(settings.root), "seed": settings.seed, "timesteps": timesteps}, run=run, settings=settings,
                on_progress=bar.rows, artefacts=["evaluations/generalist.json"])
        found = run.evaluation("generalist")
        complete = found["passed"] == len(found["metrics"])
        run.finish("passed" if complete else "failed", None if complete else f"{len(found['metrics']) - found['passed']} rungs not passed")
    finally:
        bar.close()
        run.close()
    print(f"\n{found['text']}\n\nsite: {publish(settings)}")
    return 0 if complete else 2


def summarise(settings: Settings, runs: list[str], seeds) -> None:
    "Executes the summary notebook over the runs and publishes it."
    from rlnb.lab.notebooks import execute
    from rlnb.lab.site import publish

    run = Run.create(settings, "qualification", {"runs": len(runs), "seeds": show_seeds(seeds)}, list(seeds), kind="summary")
    run.start()
    try:
        execute(settings.root / "nbs" / "stages" / f"{SUMMARY}.ipynb", settings.packets / run.id / f"{SUMMARY}.ipynb",
                {"run_dir": str(run.folder), "root": str(settings.root), "runs": ",".join(runs)}, run=run, settings=settings,
                artefacts=["evaluations/summary.json"])
        run.finish("passed")
        print(f"\n{run.evaluation('summary')['text']}\n")
    finally:
        run.close()
    print(f"summary: {publish(settings)}")
