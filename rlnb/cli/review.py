"""Audit and review of a run: evidence is gathered here from both wings, judged by `rlnb.tracker.audit`, and told by two notebooks."""
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rlnb.lab.errors import LabError
from rlnb.lab.gates import Gates, Verdict, load_gates
from rlnb.lab.runs import Run, State, file_hash, read_lines, records, recover, timeline
from rlnb.lab.settings import Settings

AUDIT, REVIEW = "signal_audit", "tracker_review"


# ---- the evidence

def trained_in(run: Run) -> Run:
    "The run that the checkpoint was trained in: this one, or an ancestor whose checkpoint was good enough to be handed on untouched."
    best = run.best_checkpoint()
    home = best.parents[1] if best else run.folder
    return Run(home) if (home / "run.json").is_file() and home != run.folder.resolve() else run


def rows_of(run: Run) -> list[dict]:
    "The training log of a run, one row per update."
    return timeline(read_lines(run.folder / "metrics.jsonl")[0])


def case_of(gates: Gates, run: Run):
    "What a review looks at, as a `Case`."
    from rlnb.tracker.audit import Case, Shortfall
    from rlnb.tracker.checkpoints import read_metadata
    from rlnb.tracker.exams import EXAMS
    from rlnb.tracker.training import practised

    stage = run.record["stage"]
    if stage not in EXAMS:
        raise LabError(f"{run.id} is a run of {stage}; reviews are for the tracker's stages: {', '.join(EXAMS)}")
    verdict, exam, best = run.evaluation("verdict"), run.evaluation("exam") or {}, run.best_checkpoint()
    if verdict is None:
        raise LabError(f"{run.id} has no verdict yet: examine it first with 'rlnb stage {stage}'")
    unmet = tuple(Shortfall(r.metric, r.op, r.limit, r.value) for r in Verdict.from_dict(verdict).pass_rows if not r.ok)
    about, budget = read_metadata(best) if best else None, gates[stage].budget
    return Case(stage, exam.get("metrics") or {}, unmet, rows_of(run), run.evaluation("milestones") or (), budget.default, budget.extension,
                about and about.ppo, about and about.reward_weights, practised(stage), EXAMS[stage].families)


# ---- the conditions of promotion

def conditions_of(settings: Settings, run: Run) -> list:
    "What has to hold for the pass of one run to be worth something."
    from rlnb.tracker.audit import Condition, signal_audit

    verdict, exam = run.evaluation("verdict") or {}, run.evaluation("exam") or {}
    measured = (exam.get("metrics") or {}).get("from_checkpoint") is True
    findings = signal_audit(rows_of(trained_in(run)))
    dirty = [f"{f.name}: {f.why}" for f in findings if not f.ok]
    moved = [name for name, digest in (run.record.get("config_hashes") or {"configuration": None}).items()
             if not (settings.root / name).is_file() or file_hash(settings.root / name) != digest]
    damage = _damage(run)
    return [
        Condition("gate passed", verdict.get("passed") is True, f"{run.id} has not passed its gate"),
        Condition("numbers from a checkpoint", measured, f"the exam of {run.id} was not flown from a checkpoint on disk"),
        Condition("signal audit clean", not dirty, "; ".join(dirty)),
        Condition("checkpoint unchanged", not damage, damage),
        Condition("configuration unchanged", not moved, f"{', '.join(moved)} changed since {run.id} was made"),
    ]


def _damage(run: Run) -> str:
    "What is wrong with the run's checkpoint; empty if it is bit for bit what was written."
    from rlnb.tracker.checkpoints import CheckpointError, config_of, load_policy, read_metadata
    from rlnb.tracker.environment import TrackerConfig, TrackerEnv
    from rlnb.tracker.ppo import Learner

    best = run.best_checkpoint()
    if best is None:
        return f"the checkpoint of {run.id} is not on disk"
    try:
        load_policy(best, Learner(TrackerEnv(TrackerConfig(num_envs=1, pool_rows=1)), config_of(read_metadata(best))))
    except CheckpointError as error:
        return str(error)
    return ""


def passed_run(settings: Settings, stage: str) -> Run | None:
    "The newest run of the default recipe that passed a stage."
    good = [r for r in records(settings) if r["stage"] == stage and r["status"] == "passed" and "recipe" not in (r.get("parameters") or {})]
    return Run(settings.runs / good[-1]["id"]) if good else None


def promotion_conditions(settings: Settings, gates: Gates) -> list:
    "All conditions of promotion: those of a single run, for every rung of the tracker's ladder."
    from rlnb.tracker.audit import Condition

    found = []
    for stage in gates.ladder("tracker"):
        run = passed_run(settings, stage.name)
        if run is None:
            found.append(Condition(f"{stage.name}: gate passed", False, f"no run of {stage.name} has passed; 'rlnb ladder --until {stage.name}' climbs there"))
        else:
            found += [Condition(f"{stage.name}: {c.name}", c.ok, c.why) for c in conditions_of(settings, run)]
    return found


# ---- the outcome

@dataclass(frozen=True)
class Outcome:
    "What a review comes to; plain values, as stored in `evaluations/review.json`."
    stage: str
    passed: bool
    decision: str
    because: str
    answers: dict  # cause -> reasons to suspect it
    conditions: list  # {name, ok, why}; of promotion, where the stage passed
    command: str  # what to type now


def outcome_of(settings: Settings, gates: Gates, run: Run) -> tuple[Outcome, Sequence]:
    "The outcome of a review, and the three reviews it rests on."
    from rlnb.tracker.audit import answer, decide_failing, decide_passing, reviews

    case = case_of(gates, run)
    written, stage = reviews(case), gates[case.stage]
    answers = {str(cause): list(why) for cause, why in answer(written).items()}
    if not run.evaluation("verdict")["passed"]:
        decision, because = decide_failing(case, written)
        return Outcome(case.stage, False, str(decision), because, answers, [], _command_after_fail(run, case, decision)), written
    last = stage == gates.ladder("tracker")[-1]
    conditions = promotion_conditions(settings, gates) if last else conditions_of(settings, run)
    planner = passed_run(settings, stage.next) if last and stage.next else None
    decision, because = decide_passing(last, conditions, met_planner=planner is not None)
    holds = all(c.ok for c in conditions)
    command = long_command(settings, gates, run) if last and holds else f"rlnb ladder --until {stage.next}" if holds and stage.next else "rlnb runs"
    return Outcome(case.stage, True, str(decision), because, answers, [asdict(c) for c in conditions], command), written


def _command_after_fail(run: Run, case, decision) -> str:
    "The command that follows a failing decision."
    from rlnb.tracker.audit import Decision

    if decision == Decision.more_steps:
        return f"rlnb stage {case.stage} --timesteps {max(case.budget, 2 * case.trained):_}"
    return f"rlnb audit {run.id}"


def long_command(settings: Settings, gates: Gates, run: Run) -> str:
    "The long training at the top of the ladder. Only for callers that have seen every condition hold."
    top = gates.ladder("tracker")[-1]
    return (f"rlnb stage {top.name} --timesteps {top.budget.default + top.budget.extension:_} "
            f"--checkpoint {os.path.relpath(run.best_checkpoint(), settings.root)}")


# ---- the commands

def chosen_run(settings: Settings, options) -> Run:
    "The run that was named, or the newest judged one of a stage."
    if bool(options.run) == bool(options.stage):
        raise LabError("name one run, or one stage with --stage (its newest judged run is taken); 'rlnb runs' lists them")
    if options.run:
        return Run.open(options.run, settings)
    load_gates(settings.gates)[options.stage]
    judged = [r for r in records(settings) if r["stage"] == options.stage and r["passed"] is not None]
    if not judged:
        raise LabError(f"no run of {options.stage} has been judged yet; 'rlnb stage {options.stage}' makes one")
    return Run(settings.runs / judged[-1]["id"])


def perform(settings: Settings, run: Run, name: str, artefact: str) -> dict:
    "Executes a notebook about a finished run, whose status stays what it was; returns what the notebook found."
    from rlnb.lab.notebooks import execute

    before = {key: run.record[key] for key in ("status", "started", "ended", "error")}
    if before["status"] in ("planned", "running"):
        raise LabError(f"{run.id} is {before['status']}; wait until it has ended")
    writer = Run(run.folder, writer=True)
    try:
        execute(settings.root / "nbs" / "stages" / f"{name}.ipynb", settings.packets / run.id / f"{name}.ipynb",
                {"run_dir": str(run.folder), "root": str(settings.root), "stage": run.record["stage"]},
                run=writer, settings=settings, artefacts=[f"evaluations/{artefact}.json"])
    finally:
        run.update(**before)
        writer.close()
    return run.evaluation(artefact)


def _tell(settings: Settings, run: Run, name: str) -> None:
    "Brings the site up to date and says where the packet is."
    from rlnb.lab.site import publish

    publish(settings)
    print(f"\npacket: {os.path.relpath(settings.site / 'packets' / run.id / f'{name}.html')}")


def audit(options) -> int:
    "`rlnb audit`: 0 if the signals are sound, 2 if not."
    from rlnb.cli.main import settings_of
    from rlnb.lab.packets import table

    settings = settings_of(options)
    recover(settings)
    run = chosen_run(settings, options)
    found = perform(settings, run, AUDIT, "audit")
    print(f"{run.id}: signal audit of {found['updates']} updates of {found['trained_in']}\n")
    print(table(("signal", "found", "limit", "", ""), [(f["name"], "missing" if f["value"] is None else f"{f['value']:.3g}", f["limit"],
                "ok" if f["ok"] else "NO", f["why"]) for f in found["findings"]], numbers=(1,)))
    _tell(settings, run, AUDIT)
    return 0 if found["clean"] else 2


def review(options) -> int:
    "`rlnb review`: writes the decision into the run and the state; 0 if nothing stands in the way, 2 if something does."
    from rlnb.cli.main import settings_of

    settings = settings_of(options)
    recover(settings)
    run, gates = chosen_run(settings, options), load_gates(settings.gates)
    found = perform(settings, run, REVIEW, "review")
    run.update(decision=found["decision"])
    State.rebuild(settings, [s.name for s in gates.ladder()])
    print(f"{run.id}: {'passed' if found['passed'] else 'not passed'}")
    for cause, why in found["answers"].items() if not found["passed"] else ():
        print(f"  {cause}: {why[0] + (f' (and {len(why) - 1} more)' if len(why) > 1 else '') if why else 'not suspected'}")
    for condition in found["conditions"]:
        print(f"  {'ok' if condition['ok'] else 'NO'}  {condition['name']}{'' if condition['ok'] else ': ' + condition['why']}")
    print(f"\ndecision: {found['decision']}\n  because {found['because']}\nnext: {found['command']}")
    _tell(settings, run, REVIEW)
    return 0 if found["passed"] and all(c["ok"] for c in found["conditions"]) else 2


def add_review_parsers(command) -> None:
    "`audit` and `review`; `command` adds one subcommand."
    for name, function, help in (("audit", audit, "judge the signals that a training learnt from; exit 0 sound, 2 not sound"),
                                 ("review", review, "review a judged run, write one decision; exit 0 go on, 2 something stands in the way")):
        sub = command(name, function, help, f"rlnb {name} --stage hover", "[RUN | --stage S]")
        sub.add_argument("run", nargs="?", help="id of a run, or its beginning")
        sub.add_argument("--stage", help="the newest judged run of this stage")
