"""The ladder: each stage is trained, examined and judged, once, unless something that matters has changed."""
import ast
import contextlib
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlnb.lab.errors import Interrupted, LabError
from rlnb.lab.gates import Gates, Stage, Verdict, check, gold_distance, load_gates
from rlnb.lab.runs import Run, State, check_writable, file_hash, records, recover
from rlnb.lab.settings import Settings, show_seeds

TRAIN, EXAM, REVIEW = "tracker_train", "tracker_exam", "tracker_review"
DEFAULT = "default"  # the recipe that needs no mention


@dataclass(frozen=True)
class Rung:
    "What came of one stage."
    stage: str
    run: Run
    verdict: Verdict
    news: str  # up to date, examined, trained, resumed or failed before
    checkpoint: Path | None


@dataclass
class Job:
    "What all rungs of one call share."
    settings: Settings
    gates: Gates
    say: "Terminal"
    fresh: bool = False
    verbose: bool = False
    timesteps: int | None = None
    recipe: str = DEFAULT
    rungs: list[Rung] = field(default_factory=list)


# ---- what has changed?

@functools.cache
def code_hash(path: Path) -> str:
    "SHA-256 of what Python code does: comments, layout and docstrings of modules and functions don't count."
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    else:
        sources = [path.read_text(encoding="utf-8")]
    digest = hashlib.sha256()
    for source in sources:
        digest.update(_dump(source).encode())
    return digest.hexdigest()


def _dump(source: str) -> str:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # notebook magics
        return source
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and body and isinstance(body[0], ast.Expr) \
                and isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
            node.body = body[1:]
    return ast.dump(tree)


def sources_hash(package: str) -> str:
    "Hash over the modules of a package of this project."
    import rlnb

    folder = Path(rlnb.__file__).parent / package
    return _hash([(p.relative_to(folder).as_posix(), code_hash(p)) for p in sorted(folder.rglob("*.py"))])


def _hash(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def fingerprints(job: Job, stage: Stage, parent: Path | None) -> dict[str, str]:
    """What the training and the exam of a stage depend on, each as one hash.

    The training knows the gate's gold column (it may stop there) and its budget; the exam depends on everything else as well."""
    entry, notebooks = asdict(stage), job.settings.root / "nbs" / "stages"
    train = _hash([code_hash(notebooks / f"{TRAIN}.ipynb"), sources_hash("tracker"), job.settings.seed, show_seeds(job.settings.validation_seeds),
                   job.timesteps, entry["budget"], entry["gold"], file_hash(parent) if parent else None, *said(job).values()])
    exam = _hash([train, code_hash(notebooks / f"{EXAM}.ipynb"), sources_hash("lab"), entry, show_seeds(job.settings.exam_seeds),
                  job.settings.reader_language])
    return {"train": train, "exam": exam}


def said(job: Job) -> dict[str, str]:
    "The recipe as a parameter, if it is worth mentioning."
    return {} if job.recipe == DEFAULT else {"recipe": job.recipe}


def newest(job: Job, stage: Stage, marks: dict) -> dict | None:
    "The record of the newest run of a stage whose training depends on the same things."
    same = [r for r in records(job.settings) if r["stage"] == stage.name and (r.get("fingerprints") or {}).get("train") == marks["train"]]
    return same[-1] if same else None


# ---- one rung

def rung(job: Job, stage: Stage, parent: Rung | None, checkpoint: Path | None) -> Rung:
    "Trains and examines a stage, or finds that there is nothing to do."
    marks = fingerprints(job, stage, checkpoint)
    known = None if job.fresh else newest(job, stage, marks)
    if known and known["fingerprints"] == marks and known["status"] in ("passed", "failed"):
        run = Run.open(job.settings.runs / known["id"])
        stored = run.evaluation("verdict")
        complete = run.best_checkpoint() and all(packet(job, run, name).exists() for name in (TRAIN, EXAM))
        if stored and complete and stored["passed"] == (known["status"] == "passed"):
            verdict = Verdict.from_dict(stored)
            job.say(f"{stage.name}: up to date" if verdict.passed else
                    f"{stage.name}: not passed in {run.id}, and nothing has changed since; --fresh trains it anew")
            return Rung(stage.name, run, verdict, "up to date" if verdict.passed else "failed before", run.best_checkpoint())
    return _work(job, stage, parent, checkpoint, marks, known)


def _work(job: Job, stage: Stage, parent: Rung | None, checkpoint: Path | None, marks: dict, known: dict | None) -> Rung:
    "Trains what is not trained, examines, judges; once more with the extension's budget unless that is gold."
    run, news, done = _open_run(job, stage, parent, checkpoint, marks, known)
    with closing(run):
        run.start()
        run.update(fingerprints=marks)
        budget = job.timesteps or stage.budget.default
        total = max(budget, run.record.get("extended_to") or 0)
        if done < total or not run.best_checkpoint():
            train(job, stage, run, checkpoint, total, resume=any(run.checkpoints.iterdir()))
        verdict = examine(job, stage, run)
        if not verdict.gold and not job.timesteps and stage.budget.extension and total == budget:  # gold is the aim, a pass is the key
            total = budget + stage.budget.extension
            run.update(extended_to=total)
            train(job, stage, run, checkpoint, total, resume=True)
            verdict = examine(job, stage, run)
        if not verdict.passed:
            review(job, stage, run)
        run.finish("passed" if verdict.passed else "failed", None if verdict.passed else f"gate: {'; '.join(verdict.reasons)}")
    return Rung(stage.name, run, verdict, news, run.best_checkpoint())


def _open_run(job: Job, stage: Stage, parent: Rung | None, checkpoint: Path | None, marks: dict, known: dict | None) -> tuple[Run, str, int]:
    "The run to work in, what is done in it, and how many steps of it are trained already."
    if known:
        run = Run.open(job.settings.runs / known["id"])
        if known.get("trained") and run.best_checkpoint():
            job.say(f"{stage.name}: trained already in {run.id}")
            return Run(run.folder, writer=True), "examined", known["trained"]
        if any(run.checkpoints.iterdir()):
            job.say(f"{stage.name}: {run.id} was {known['status']} at step {run.last_step():,}; it goes on from its last checkpoint")
            return Run(run.folder, writer=True), "resumed", 0
    run = Run.create(job.settings, stage.name, {"timesteps": job.timesteps or stage.budget.default, "seed": job.settings.seed,
                     "checkpoint": near(checkpoint, job.settings.root) if checkpoint else "", **said(job)}, job.settings.seed, parent.run.id if parent else None)
    return run, "trained", 0


@contextlib.contextmanager
def closing(run: Run):
    "Whatever ends the work on a run early is written into its record."
    try:
        yield
    except BaseException as error:
        if run.record["status"] == "running":
            stopped = isinstance(error, (KeyboardInterrupt, Interrupted))
            run.finish("interrupted" if stopped else "failed", str(error) or ("stopped" if stopped else type(error).__name__))
        raise
    finally:
        run.close()


# ---- its two notebooks

def packet(job: Job, run: Run, name: str) -> Path:
    return job.settings.packets / run.id / f"{name}.ipynb"


def train(job: Job, stage: Stage, run: Run, checkpoint: Path | None, total: int, resume: bool) -> None:
    "Executes the training notebook with a progress bar."
    source = f" from {near(checkpoint, job.settings.root)}" if checkpoint else ""
    job.say(f"{stage.name}: training {'goes on ' if resume else ''}to {total:,} steps{'' if resume else source}, run {run.id}")
    bar = progress(stage.name, total, job.say)
    try:
        notebook(job, run, TRAIN, {"stage": stage.name, "seed": job.settings.seed, "timesteps": total, "resume": resume,
                                    "checkpoint": str(checkpoint or ""), **said(job)}, ["evaluations/best.json"], bar.rows)
    finally:
        bar.close()
    run.update(trained=total)


def examine(job: Job, stage: Stage, run: Run) -> Verdict:
    "Executes the exam notebook and judges what it wrote."
    best = run.best_checkpoint()
    if best is None:
        raise LabError(f"{stage.name}: evaluations/best.json of {run.id} names no checkpoint that is on disk; run it again with --fresh")
    job.say.wait(f"{stage.name}: flying the exam ...")
    notebook(job, run, EXAM, {"stage": stage.name, "checkpoint": str(best)}, ["evaluations/exam.json"])
    exam = run.evaluation("exam")
    metrics = exam.get("metrics") if isinstance(exam, dict) else None
    history = [{"stage": r["stage"], "status": r["status"]} for r in records(job.settings)]
    verdict = check(job.gates, stage.name, metrics if isinstance(metrics, dict) else {}, history, require_prerequisites=True)
    run.save_evaluation("verdict", verdict.to_dict())
    job.say(f"{stage.name}: {'passed, ' + gold_distance(verdict) if verdict.passed else 'NOT passed: ' + '; '.join(verdict.reasons)}")
    return verdict


def review(job: Job, stage: Stage, run: Run) -> dict:
    "Executes the review notebook, and writes the decision that it comes to into the run's record."
    job.say.wait(f"{stage.name}: reviewing what went wrong ...")
    notebook(job, run, REVIEW, {"stage": stage.name}, ["evaluations/review.json"])
    found = run.evaluation("review")
    run.update(decision=found["decision"])
    job.say(f"{stage.name}: decision {found['decision']}: {found['because']}")
    return found


def notebook(job: Job, run: Run, name: str, parameters: dict, artefacts: list[str], on_progress=None) -> None:
    "Executes a stage notebook in a run; the executed copy is the run's packet."
    from rlnb.lab.notebooks import execute

    execute(job.settings.root / "nbs" / "stages" / f"{name}.ipynb", packet(job, run, name),
            {"run_dir": str(run.folder), "root": str(job.settings.root), **parameters}, run=run, settings=job.settings,
            on_progress=on_progress, on_output=(lambda text: print(text, end="", flush=True)) if job.verbose else None, artefacts=artefacts)


# ---- what is seen on the terminal

class Terminal:
    "Lines, and on a terminal also a line that only stands there until the next one comes."

    def __init__(self):
        self.waiting = False

    def __call__(self, line: str) -> None:
        self.clear()
        print(line, flush=True)

    def wait(self, line: str) -> None:
        if sys.stdout.isatty():
            self.clear()
            print(line, end="", flush=True)
            self.waiting = True

    def clear(self) -> None:
        if self.waiting:
            print("\r\033[K", end="", flush=True)
            self.waiting = False


def progress(name: str, total: int, say: Callable[[str], None]):
    "A bar on a terminal, a line every few seconds elsewhere."
    return Bar(name, total) if sys.stdout.isatty() else Lines(name, total, say)


class Pace:
    "Speed, time left and position error in words, from the rows of the log."

    def __init__(self, total: int):
        self.total, self.first = total, None

    def words(self, rows: list[dict]) -> str:
        now, row = time.monotonic(), rows[-1]
        self.first = self.first or (now, rows[0]["step"])
        speed, error = row.get("steps_per_s"), row.get("position_error")
        if not isinstance(speed, (int, float)):
            speed = (row["step"] - self.first[1]) / (now - self.first[0]) if now > self.first[0] + 1 else 0
        words = [f"position error {100 * error:.1f} cm"] if isinstance(error, (int, float)) else []
        if 0 < speed < float("inf"):
            left = round(max(self.total - row["step"], 0) / speed)
            words = [f"{speed:,.0f} steps/s", f"{left // 60}:{left % 60:02d} left", *words]
        return ", ".join(words)


class Bar:
    "tqdm, moved by the rows of the log. It stands there from the start, while the training is still being compiled."

    def __init__(self, name: str, total: int):
        from tqdm import tqdm

        self.pace = Pace(total)
        width = os.get_terminal_size(sys.stdout.fileno()).columns  # 0 where a terminal has not been told its size
        self.bar = tqdm(total=total, desc=name, unit_scale=True, file=sys.stdout, mininterval=0, postfix="starting",
                        dynamic_ncols=width > 0, ncols=None if width else 100, nrows=None if width else 20,
                        bar_format="{desc} {percentage:3.0f}% {bar} {n_fmt}/{total_fmt} steps{postfix}")

    def rows(self, rows: list[dict]) -> None:
        self.bar.set_postfix_str(self.pace.words(rows), refresh=False)
        self.bar.n = min(rows[-1]["step"], self.bar.total)
        self.bar.refresh()

    def close(self) -> None:
        self.bar.close()


class Lines:
    "Plain lines, for logs and pipes."

    def __init__(self, name: str, total: int, say: Callable[[str], None], every: float = 5.0):
        self.name, self.total, self.say, self.every, self.last, self.pace = name, total, say, every, float("-inf"), Pace(total)

    def rows(self, rows: list[dict]) -> None:
        words = self.pace.words(rows)
        if time.monotonic() - self.last >= self.every or rows[-1]["step"] >= self.total:
            self.last = time.monotonic()
            self.say(f"{self.name}: {rows[-1]['step']:,} / {self.total:,} steps, {words}")

    def close(self) -> None:
        pass


def near(path: Path, root: Path) -> str:
    "A path as seen from the project's root."
    return os.path.relpath(path, root)


def address(index: Path) -> str:
    "Where the site is: as a path from here, and as a link."
    return f"site: {os.path.relpath(index)}\n      {Path(index).resolve().as_uri()}"


def summary(rungs: list[Rung]) -> str:
    "The table at the end."
    from rlnb.lab.packets import table

    rows = [(r.stage, "gold" if r.verdict.gold else "passed" if r.verdict.passed else "NOT passed", r.news, r.run.id,
             gold_distance(r.verdict) if r.verdict.passed else "; ".join(r.verdict.reasons)) for r in rungs]
    return str(table(("stage", "verdict", "", "run", "how far gold is"), rows))


# ---- the climb

def climb(settings: Settings, start: str | None = None, until: str | None = None, fresh: bool = False, verbose: bool = False,
          timesteps: int | None = None, checkpoint: str | None = None, recipe: str = DEFAULT) -> int:
    "Climbs from one stage to another; returns 0 when all passed, 2 when one did not."
    return 0 if all(r.verdict.passed for r in climbed(settings, start, until, fresh, verbose, timesteps, checkpoint, recipe)) else 2


def climbed(settings: Settings, start: str | None = None, until: str | None = None, fresh: bool = False, verbose: bool = False,
            timesteps: int | None = None, checkpoint: str | None = None, recipe: str = DEFAULT) -> list[Rung]:
    "Climbs from one stage to another, up to the first that does not pass; returns the rungs."
    gates = load_gates(settings.gates)
    stages = _chosen(gates, start, until)
    job = Job(settings, gates, Terminal(), fresh, verbose, timesteps, recipe)
    for run in recover(settings):
        job.say(f"{run}: its process is gone; it is marked as crashed")
    check_writable(settings.runs, settings.packets, settings.site, settings.state.parent)
    # An experiment with another recipe begins with new weights, or it would live on what the default recipe has learnt.
    parent, given = below(job, stages[0]) if recipe == DEFAULT else None, named(checkpoint)
    try:
        for stage in stages:
            job.rungs.append(rung(job, stage, parent, given or (parent.checkpoint if parent else None)))
            parent, given = job.rungs[-1], None
            if not parent.verdict.passed:
                break
    finally:
        conclude(job)
    return job.rungs


def _chosen(gates: Gates, start: str | None, until: str | None) -> list[Stage]:
    "The stages from one name to another."
    ladder = gates.ladder("tracker")
    names = [s.name for s in ladder]
    for name in filter(None, (start, until)):
        if gates[name].name not in names:
            raise LabError(f"{name} is not a stage of the tracker's ladder; its stages are {', '.join(names)}")
    first, last = names.index(start) if start else 0, names.index(until) if until else len(names) - 1
    if first > last:
        raise LabError(f"--from {start} comes after --until {until}; swap them")
    return ladder[first:last + 1]


def below(job: Job, stage: Stage) -> Rung | None:
    "The newest run of the stage before that passed under this seed; its checkpoint is handed on."
    if not stage.prerequisite:
        return None
    for record in reversed(records(job.settings)):
        said = record.get("parameters") or {}
        usual = "recipe" not in said and said.get("seed") == job.settings.seed  # an experiment's checkpoint is handed on only if it is named
        if usual and record["stage"] == stage.prerequisite and record["status"] == "passed":
            run = Run.open(job.settings.runs / record["id"])
            if (verdict := run.evaluation("verdict")) and run.best_checkpoint():
                return Rung(record["stage"], run, Verdict.from_dict(verdict), "up to date", run.best_checkpoint())
    raise LabError(f"{stage.name} is locked: {stage.prerequisite} has not passed under seed {job.settings.seed}; "
                   f"'rlnb ladder --until {stage.prerequisite}' climbs up to it, --checkpoint names another policy to start from")


def named(checkpoint: str | None) -> Path | None:
    "The checkpoint that was named on the command line, if any; one that is not there is an error."
    if checkpoint and not Path(checkpoint).is_dir():
        raise LabError(f"--checkpoint {checkpoint}: there is no such folder; 'rlnb runs' shows the checkpoints of all runs")
    return Path(checkpoint).resolve() if checkpoint else None


def conclude(job: Job) -> None:
    "Writes the state, builds the site, and says what came out and where it is. Does not hide an error that is on its way."
    from rlnb.lab.site import publish

    job.say.clear()
    failing = sys.exc_info()[0] is not None
    try:
        State.rebuild(job.settings, [s.name for s in job.gates.ladder()])
        index = publish(job.settings)
    except LabError as error:
        if not failing:
            raise
        job.say(f"the site was not built: {error}")
        return
    if job.rungs:
        job.say(f"\n{summary(job.rungs)}\n")
    job.say(address(index))
    if not failing and all(r.news == "up to date" for r in job.rungs):
        job.say("everything is up to date: nothing was executed")
