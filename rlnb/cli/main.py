"""`rlnb`: one entry, a few words. Nothing heavy is imported before it is needed, so that help and settings answer at once."""
import argparse
import os
import re
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from rlnb import __version__
from rlnb.cli.autoresearch import add_search_options
from rlnb.cli.car import add_car_parser
from rlnb.cli.race import add_race_options
from rlnb.cli.review import add_review_parsers
from rlnb.lab.errors import Interrupted, LabError, did_you_mean
from rlnb.lab.settings import SETTINGS, Settings, find_root, load_settings, settings_text

# What these say is meant for people, as it is. The wings raise ValueErrors of their own for bad input.
PLAIN_ERRORS = (LabError, ValueError, FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)


class Parser(argparse.ArgumentParser):
    "Errors in one line with a guess at what was meant, and exit code 1: code 2 means 'not passed' here."

    def error(self, message: str):
        if found := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            options = [o for action in self._actions for o in action.option_strings]
            message = f"unknown option {found[1]}{did_you_mean(found[1], options)}"
        elif found := re.search(r"argument \w+: invalid choice: '([^']*)' \(choose from (.*)\)", message):
            message = f"unknown {'command' if self.prog == 'rlnb' else 'word'} {found[1]!r}{did_you_mean(found[1], re.findall(r'[a-z]+', found[2]))}"
        raise LabError(f"{message}; '{self.prog} --help' shows what there is")


def parser() -> argparse.ArgumentParser:
    "The whole command line."
    common = argparse.ArgumentParser(add_help=False)
    group = common.add_argument_group("settings", "override settings.ini and the environment for this command")
    group.add_argument("--root", metavar="DIR", help="the project's folder (default: found by walking up to settings.ini)")
    for name, field in SETTINGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"setting_{name}", metavar=_word(name, field), help=field.metadata["help"])
    top = Parser(prog="rlnb", description="Train, examine, gate and report, from notebooks.",
                                  epilog="example: rlnb ladder --until point_hold", formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--version", action="version", version=f"rlnb {__version__}")
    commands = top.add_subparsers(dest="command", metavar="command", required=True)

    def command(name, function, help, example, words=""):
        sub = commands.add_parser(name, parents=[common], help=help, description=help[0].upper() + help[1:] + ".",
                                  epilog=f"example: {example}", allow_abbrev=False, usage=f"rlnb {name} [options]{' ' * bool(words)}{words}")
        sub.set_defaults(function=function, parser=sub)
        return sub

    command("settings", show_settings, "print every setting and where its value comes from", "rlnb settings --seed 7")
    sub = command("runs", show_runs, "list the runs, or show one", "rlnb runs --stage hover", "[run]")
    sub.add_argument("run", nargs="?", help="id of a run, or its beginning")
    sub.add_argument("--stage", help="only runs of this stage")
    sub.add_argument("--status", help="only runs with this status")
    sub = command("gate", judge, "judge metrics against a stage's gate; exit 0 passed, 2 not passed, 1 unusable input",
                  "rlnb gate --stage hover --metrics-json tests/data/hover_exam.json", "--stage S --metrics-json F")
    sub.add_argument("--stage", required=True, help="name of the stage")
    sub.add_argument("--metrics-json", required=True, type=Path, metavar="F", help="a JSON object of metrics, or an exam.json of a run")
    sub.add_argument("--history-json", type=Path, metavar="H", help="earlier verdicts: {stage: passed} or a list of {stage, passed}")
    sub.add_argument("--require-prerequisites", action="store_true", help="the stage before must have passed in the history")
    command("publish", publish_site, "build the site from all packets", "rlnb publish")
    sub = command("state", rebuild_state, "rebuild the ladder's state from the run folders", "rlnb state rebuild", "rebuild")
    sub.add_argument("action", choices=["rebuild"], help="what to do")
    sub = command("stage", run_stage, "train and examine one stage", "rlnb stage hover", "STAGE")
    sub.add_argument("stage", help="name of the stage")
    _training_options(sub)
    sub.add_argument("--timesteps", type=_count, metavar="N", help="environment steps instead of the gate file's budget, such as 1_000_000")
    sub.add_argument("--recipe", default="default", metavar="NAME", help="reward, hyper-parameters and disturbances by name: default, randomised, or known_bad to see what fails and why")
    sub.add_argument("--checkpoint", metavar="DIR", help="start from this checkpoint instead of the best one of the stage before")
    sub = command("ladder", run_ladder, "climb the ladder: train and examine what has not passed yet", "rlnb ladder --until point_hold")
    sub.add_argument("--until", metavar="STAGE", help="the last stage to climb (default: the last one there is)")
    sub.add_argument("--from", dest="start", metavar="STAGE", help="the first stage to climb; those before must have passed")
    _training_options(sub)
    sub = command("qualify", run_qualify, "climb the whole ladder under several seeds and summarise", "rlnb qualify --seeds 1-3 --until point_hold")
    sub.add_argument("--seeds", default="1-3", help="training seeds, such as 1-3 or 1,5,9 (default: 1-3)")
    sub.add_argument("--until", metavar="STAGE", help="the last stage to climb (default: the last one there is)")
    _training_options(sub)
    sub = command("generalist", run_generalist, "train one policy on all command families alike and examine it on every rung", "rlnb generalist --timesteps 4_000_000")
    sub.add_argument("--timesteps", type=_count, default=4_000_000, metavar="N", help="environment steps (default: 4_000_000)")
    sub = command("batch", run_batch, "run notebooks with parameters in the order of their dependencies; what is up to date is left alone",
                  "rlnb batch data/batches/hover_seeds.toml --workers 2", "FILE")
    sub.add_argument("file", type=Path, metavar="FILE", help="a batch file; see data/batches")
    sub = command("race", run_race, "fly a block of races under a planner", "rlnb race --planner slow --seeds 5000-5019 --pilot pd")
    add_race_options(sub)
    sub = command("race-train", run_race_train, "teach the ladder's tracker to follow what a racing planner asks for", "rlnb race-train --seed 1")
    sub.add_argument("--checkpoint", metavar="C", help="tracker to start from (default: the newest that passed the ladder's last tracker stage)")
    sub.add_argument("--effort", type=float, default=1.0, metavar="SHARE", help="share of the usual steps, for a quick look (default: 1)")
    sub.add_argument("--verbose", action="store_true", help="show what the notebook prints")
    sub = command("autoresearch", run_autoresearch, "search settings by itself: random trials first, then a Gaussian process",
                  "rlnb autoresearch tracker --trials 12 --confirm 5", "NAME")
    sub.add_argument("study", metavar="NAME", help="which space file of data/search: tracker, car, or one of your own")
    add_search_options(sub)
    add_review_parsers(command)
    add_car_parser(commands)
    return top


def _training_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--fresh", action="store_true", help="train anew even if nothing has changed")
    sub.add_argument("--verbose", action="store_true", help="show what the notebooks print")


def _word(name: str, field) -> str:
    "What stands for a setting's value in the help."
    return "PATH" if field.metadata["section"] == "folders" else "SEEDS" if name.endswith("seeds") else "VALUE"


def _count(text: str) -> int:
    "A positive whole number; underscores and 2e6 are fine."
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        value = 0.5
    if value != int(value) or value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of steps")
    return int(value)


def settings_of(options: argparse.Namespace) -> Settings:
    "Settings with this command's flags."
    flags = {name: getattr(options, f"setting_{name}") for name in SETTINGS}
    if options.root and not (Path(options.root) / "settings.ini").is_file():
        raise LabError(f"--root {options.root}: there is no settings.ini; name the project's folder")
    return load_settings(options.root, flags=flags)


# ---- the commands; each returns the exit code

def show_settings(options) -> int:
    print(settings_text(settings_of(options)))
    return 0


def show_runs(options) -> int:
    from rlnb.lab.packets import table
    from rlnb.lab.runs import Run, recover, records

    settings = settings_of(options)
    recover(settings)
    if options.run:
        return _show_run(Run.open(options.run, settings))
    chosen = [r for r in records(settings) if options.stage in (None, r["stage"]) and options.status in (None, r["status"])]
    if not chosen:
        print("no runs yet: 'rlnb ladder --until hover' makes the first one" if not (options.stage or options.status) else "no such runs")
        return 0
    verdict = {(True, True): "gold", (True, False): "passed", (False, False): "not passed"}
    print(table(("run", "stage", "status", "verdict", "started", "checkpoint", "error"),
                [(r["id"], r["stage"], r["status"], verdict.get((r.get("passed"), r.get("gold")), ""), r.get("started") or "",
                  r.get("checkpoint") or "", (r.get("error") or "")[:100]) for r in chosen]))
    return 0


def _show_run(run) -> int:
    from rlnb.lab.gates import Verdict

    print(run)
    record = run.record
    for key in ("parameters", "seeds", "parent", "started", "ended", "command"):
        print(f"  {key:12} {record.get(key)}")
    print(f"  {'folder':12} {os.path.relpath(run.folder)}")
    if verdict := run.evaluation("verdict"):
        print(f"\n{Verdict.from_dict(verdict)}")
    return 0


def judge(options) -> int:
    from rlnb.lab.gates import check, load_gates, verdict_text
    from rlnb.lab.runs import read_json

    settings = settings_of(options)
    gates = load_gates(settings.gates)
    gates[options.stage]  # an unknown stage is named before any file is read
    metrics = _read_input(options.metrics_json, read_json, "--metrics-json")
    if isinstance(metrics, dict) and isinstance(metrics.get("metrics"), dict):
        metrics = metrics["metrics"]
    if not isinstance(metrics, dict):
        raise LabError(f"--metrics-json {options.metrics_json}: must hold a JSON object of metrics, not a {type(metrics).__name__}")
    history = _read_input(options.history_json, read_json, "--history-json") if options.history_json else None
    verdict = check(gates, options.stage, metrics, history, options.require_prerequisites)
    print(verdict_text(verdict))
    return 0 if verdict.passed else 2


def _read_input(path: Path, read, flag: str):
    if not path.is_file():
        raise LabError(f"{flag} {path}: there is no such file")
    return read(path)


def publish_site(options) -> int:
    from rlnb.cli.ladder import address
    from rlnb.lab.runs import recover
    from rlnb.lab.site import publish

    settings = settings_of(options)
    recover(settings)
    print(address(publish(settings, progress=print)))
    return 0


def rebuild_state(options) -> int:
    from rlnb.lab.gates import load_gates
    from rlnb.lab.runs import State, recover

    settings = settings_of(options)
    for run in recover(settings):
        print(f"{run}: crashed")
    state = State.rebuild(settings, [s.name for s in load_gates(settings.gates).ladder()])
    print(f"{len(state.history)} runs; next stage: {state.current_stage or 'none, all have passed'}; "
          f"passed: {', '.join(state.best) or 'none'}; written to {os.path.relpath(settings.state)}")
    return 0


def run_stage(options) -> int:
    from rlnb.cli.ladder import climb
    from rlnb.cli.race import smoke
    from rlnb.lab.gates import load_gates

    settings = settings_of(options)
    if load_gates(settings.gates)[options.stage].kind == "race":
        if options.timesteps or options.recipe != "default":
            raise LabError(f"{options.stage} trains nothing: --timesteps and --recipe make no sense there")
        return smoke(settings, options.stage, options.checkpoint, options.verbose)
    return climb(settings, start=options.stage, until=options.stage, fresh=options.fresh, verbose=options.verbose,
                 timesteps=options.timesteps, checkpoint=options.checkpoint, recipe=options.recipe)


def run_qualify(options) -> int:
    from rlnb.cli.qualify import qualify
    from rlnb.lab.settings import read_seeds

    return qualify(settings_of(options), read_seeds(options.seeds), options.until, options.fresh, options.verbose)


def run_generalist(options) -> int:
    from rlnb.cli.qualify import generalist

    return generalist(settings_of(options), options.timesteps)


def run_batch(options) -> int:
    from rlnb.cli.batch import batch

    return batch(settings_of(options), options.file)


def run_race_train(options) -> int:
    from rlnb.cli.race_train import race_train

    return race_train(settings_of(options), options)


def run_race(options) -> int:
    from rlnb.cli.race import race

    return race(settings_of(options), options)


def run_autoresearch(options) -> int:
    from rlnb.cli.autoresearch import autoresearch

    return autoresearch(settings_of(options), options, options.study)


def run_ladder(options) -> int:
    from rlnb.cli.ladder import climb

    return climb(settings_of(options), start=options.start, until=options.until, fresh=options.fresh, verbose=options.verbose)


# ---- around the commands

def _stop(number, frame):
    raise Interrupted(f"stopped by {signal.Signals(number).name}", exit_code=128 + number)


def main(arguments=None) -> int:
    "Runs a command; every error becomes one line on stderr and an exit code."
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        options, rest = parser().parse_known_args(arguments)
        if rest:
            options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
        code = options.function(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read our output has gone; that is no error
        return 0
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except LabError as error:
        return _say(str(error), error.exit_code)
    except PLAIN_ERRORS as error:
        return _say(_one_line(error), 1)
    except Exception as error:
        return _say(f"{type(error).__name__}: {_one_line(error)}; this is a defect, its traceback is in {_keep_traceback()}", 1)


def _say(line: str, code: int) -> int:
    print(f"rlnb: error: {line}", file=sys.stderr)
    return code


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _keep_traceback() -> str:
    "Writes the traceback beside the runs, or into the system's folder for temporary files."
    try:
        folder = find_root() / "data"
    except LabError:
        folder = Path(tempfile.gettempdir())
    for place in (folder, Path(tempfile.gettempdir())):
        try:
            (place / "rlnb-traceback.log").write_text(traceback.format_exc())
            return os.path.relpath(place / "rlnb-traceback.log")
        except OSError:
            continue
    return "nowhere: no folder could be written"


if __name__ == "__main__":
    sys.exit(main())
