"""`rlnb autoresearch` and `rlnb car autoresearch`: a search that runs by itself, resumes by itself, and may push what it finds."""
import argparse
import os
from pathlib import Path

from rlnb.lab.errors import LabError
from rlnb.lab.settings import Settings


def add_search_options(sub: argparse.ArgumentParser) -> None:
    "The options that both commands share."
    sub.add_argument("--trials", type=_whole(1), default=12, metavar="N", help="trials that the study shall have in the end, earlier ones included (default %(default)s)")
    sub.add_argument("--min-trials-before-gp", type=_whole(1), default=3, metavar="N",
                     help="random trials that must succeed before the Gaussian process proposes (default %(default)s)")
    sub.add_argument("--push-every", type=_whole(1), metavar="K", help="commit the results file and the champion's manifest and push the current branch after every K results")
    sub.add_argument("--remote", default="origin", help="where to push to (default %(default)s)")
    sub.add_argument("--confirm", type=_whole(1), metavar="K", help="afterwards train the best parameters and the defaults again under K fresh seeds each, and compare")
    sub.add_argument("--search-seed", type=_whole(0), default=1, metavar="S", help="of the search; trial n trains with seed S + n (default %(default)s)")
    sub.add_argument("--space", type=Path, metavar="TOML", help="a search space file instead of the one in data/search")
    sub.add_argument("--folder", type=Path, metavar="DIR", help="the study's folder (default: data/autoresearch/NAME); several processes may share one")
    sub.add_argument("--no-packet", action="store_true", help="do not execute the report's notebook at the end")


def _whole(least: int):
    def read(text: str) -> int:
        if not text.replace("_", "").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)
    return read


def autoresearch(settings: Settings, options, name: str) -> int:
    "Searches, pushes, confirms, reports. Exit code 0 when the study has a result, 2 when every trial failed."
    from rlnb.car.champion import ChampionTracker
    from rlnb.lab.publishing import Publisher
    from rlnb.lab.search import RESULTS, Study, confirm, search
    from rlnb.lab.spaces import find_objective, load_space

    file = options.space or settings.root / "data" / "search" / f"{name}.toml"
    space = load_space(file)
    folder = options.folder or settings.root / "data" / "autoresearch" / space.name
    study = Study(space, folder, options.search_seed, options.min_trials_before_gp, ChampionTracker(folder, say).update_if_better, say)
    say(f"study {space.name} in {os.path.relpath(folder)}: {len(study.results())} results so far; searched is the {find_objective(space.objective).measure}")
    publisher = Publisher([folder / RESULTS, folder / "champion" / "manifest.json"], options.push_every, options.remote, say) if options.push_every else None
    rows = search(study, options.trials, publisher.after if publisher else lambda rows: None)
    if publisher:
        publisher.push(len(rows))
    if study.best() is None:
        raise LabError(f"none of {len(rows)} trials succeeded; the last one: {rows[-1]['error']}; see log.txt in its folder", exit_code=2)
    if options.confirm:
        confirm(study, options.confirm)
    if not options.no_packet:
        report(settings, study, file)
    return 0


def report(settings: Settings, study, file: Path) -> None:
    "Executes the study's notebook as a run of its own and publishes it."
    from rlnb.cli.ladder import address, closing
    from rlnb.lab.notebooks import execute
    from rlnb.lab.runs import Run
    from rlnb.lab.site import publish

    run = Run.create(settings, f"autoresearch_{study.space.name}", {"results": len(study.results())}, study.seed, kind="search", configs=[file])
    with closing(run):
        execute(settings.root / "nbs" / "stages" / "autoresearch.ipynb", settings.packets / run.id / "autoresearch.ipynb",
                {"run_dir": str(run.folder), "root": str(settings.root), "study": str(study.folder), "space": str(file), "search_seed": study.seed,
                 "random_trials": study.random_trials}, run=run, settings=settings, artefacts=["evaluations/search.json"])
        run.finish("passed")
    say(run.evaluation("search")["text"])
    say(address(publish(settings)))


def say(line: str) -> None:
    print(line, flush=True)
