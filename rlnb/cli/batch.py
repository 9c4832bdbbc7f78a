"""`rlnb batch`: the notebooks of a batch file, in order, here or on a cluster; then a packet that compares the runs."""
import contextlib
from dataclasses import asdict
from pathlib import Path

from rlnb.lab.errors import LabError
from rlnb.lab.settings import Settings

SUMMARY = "batch_summary"


def batch(settings: Settings, file: Path) -> int:
    "Runs a batch file; returns 0 when every task is done or up to date, 2 when not."
    from rlnb.lab.batches import load_batch, pool, run_batch
    from rlnb.lab.runs import check_writable

    if not file.is_file():
        raise LabError(f"there is no batch file {file}")
    name, jobs = load_batch(file, settings.root)
    check_writable(settings.runs, settings.packets, settings.site)
    with pool(settings) as executor, _plain_interrupt():
        outcomes = run_batch(name, jobs, settings, executor, lambda line: print(line, flush=True))
    if any(o.news == "done" for o in outcomes.values()):
        _summarise(settings, name, file, outcomes)
    counts = {news: sum(o.news == news for o in outcomes.values()) for news in ("done", "up to date", "failed", "skipped")}
    print(", ".join(f"{count} {news}" for news, count in counts.items() if count))
    return 0 if all(o.ok for o in outcomes.values()) else 2


@contextlib.contextmanager
def _plain_interrupt():
    "Says how to go on after a Ctrl-C."
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted: the same command goes on with what is not done", flush=True)
        raise


def _summarise(settings: Settings, name: str, file: Path, outcomes: dict) -> None:
    "Executes the summary notebook as a run of its own and publishes it."
    from rlnb.cli.ladder import address, closing
    from rlnb.lab.notebooks import execute
    from rlnb.lab.runs import Run
    from rlnb.lab.site import publish

    run = Run.create(settings, f"batch_{name}", {"tasks": len(outcomes)}, settings.seed, kind="summary", configs=[file])
    with closing(run):
        execute(settings.root / "nbs" / "stages" / f"{SUMMARY}.ipynb", settings.packets / run.id / f"{SUMMARY}.ipynb",
                {"run_dir": str(run.folder), "root": str(settings.root), "batch": name, "outcomes": [asdict(o) for o in outcomes.values()]},
                run=run, settings=settings, artefacts=["evaluations/summary.json"])
        run.finish("passed")
    print(address(publish(settings)))
