"""Signal audit, review and decision: always exactly one decision, and none that the numbers do not carry."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from rlnb.cli.review import chosen_run, conditions_of, outcome_of, passed_run, promotion_conditions, trained_in
from rlnb.lab.errors import LabError
from rlnb.lab.gates import check, load_gates
from rlnb.lab.runs import Run, State
from rlnb.tracker.audit import (
    CHECKS,
    FAILING,
    PASSING,
    TOO_SHORT,
    Case,
    Cause,
    Condition,
    Decision,
    Shortfall,
    answer,
    clean,
    decide_failing,
    decide_passing,
    reviews,
    signal_audit,
)
from rlnb.tracker.exams import EXAMS

DATA = ROOT / "tests" / "data"
LOGS = {name: json.loads((DATA / f"{name}_log.json").read_text()) for name in ("default", "known_bad")}
STORED = json.loads((DATA / "known_bad_case.json").read_text())
KNOWN_BAD = Case(
    **(STORED | {"unmet": tuple(Shortfall(**s) for s in STORED["unmet"]), "examined": tuple(STORED["examined"])}), log=LOGS["known_bad"]
)
LEVEL = [row | {"position_error": 0.03, "reward": 1.0} for row in LOGS["default"]]  # sound signals, curves that have levelled off
SOUND = replace(
    KNOWN_BAD,
    log=LEVEL,
    weights={"position": 1.0, "velocity": 0.8, "crash": 4.0},
    budget=1_000_000,
    ppo={"epochs": 4, "minibatches": 4, "gamma": 0.98, "clip": 0.2},
)


def decided(case: Case) -> Decision:
    return decide_failing(case, reviews(case))[0]


# ---- the audit


def test_the_two_real_logs():
    assert clean(signal_audit(LOGS["default"]))
    wrong = {f.name: f.why for f in signal_audit(LOGS["known_bad"]) if not f.ok}
    assert "the critic explains nothing" in wrong["explained variance of the critic"]
    assert {"spread of the advantages", "mean reward of a step"} <= set(wrong)


def constant(steps: int = 40, **changes) -> list[dict]:
    "A log whose signals are sound and never change."
    row = {
        "log_prob_error": 1e-6,
        "clipped_actions": 0.0,
        "advantage_mean": 1.0,
        "advantage_std": 5.0,
        "reward": 1.0,
        "reward_p95": 2.0,
        "action_std": 0.37,
        "explained_variance": 0.9,
        "position_error": 0.1,
        **changes,
    }
    return [row | {"step": (i + 1) * 32768} for i in range(steps)]


@pytest.mark.parametrize("check_of", CHECKS, ids=lambda c: c.column)
def test_each_limit_on_both_sides(check_of):
    assert clean(signal_audit(constant(**{check_of.column: check_of.limit})))
    for value in (1.01 * check_of.limit, -1.01 * check_of.limit):
        assert [f.name for f in signal_audit(constant(**{check_of.column: value})) if not f.ok] == [check_of.name]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "0.1", True])
@pytest.mark.parametrize("name", [c.column for c in CHECKS] + ["explained_variance", "step"])
def test_one_missing_or_unusable_number_is_enough(name, value):
    log = constant()
    log[7] = {k: v for k, v in log[7].items() if k != name} | ({} if value is None else {name: value})
    assert not clean(signal_audit(log))


def test_no_log_is_not_clean():
    assert not any(f.ok for f in signal_audit([])) and not clean([])


def test_the_worst_usual_and_first_values():
    log = constant()
    log[0] |= {"advantage_std": 90.0, "explained_variance": -3.0}  # a critic that knows nothing yet
    log[9] |= {"action_std": 0.5}
    assert clean(signal_audit(log))
    log[20] |= {"log_prob_error": 1e-4}
    assert [f.name for f in signal_audit(log) if not f.ok] == ["log-probability, stored against recomputed"]
    assert not clean(signal_audit([row | {"action_std": 0.5} if i == 0 else row for i, row in enumerate(constant())]))
    assert not clean(signal_audit([row | {"reward_p95": 11.0} if i % 5 == 0 else row for i, row in enumerate(constant())])), (
        "a fifth of all updates"
    )


def test_a_critic_that_comes_too_late():
    late = [row | {"explained_variance": 0.9 if row["step"] > 1_200_000 else 0.1} for row in constant(60)]
    assert [f.name for f in signal_audit(late) if not f.ok] == ["explained variance of the critic"]
    soon = [row | {"explained_variance": 0.9 if row["step"] > 600_000 else 0.1} for row in constant(60)]
    assert clean(signal_audit(soon))
    once = [row | {"explained_variance": 0.9 if i == 10 else 0.1} for i, row in enumerate(constant(60))]
    assert not clean(signal_audit(once)), "a single update is no rise"


# ---- the reviews and the decision


def test_known_bad_names_the_critic_the_trunk_and_the_reward():
    written = reviews(KNOWN_BAD)
    assert [r.title for r in written] == ["Metrics", "Learning curves and PPO diagnostics", "Structure"] and all(
        r.sentences for r in written
    )
    found = answer(written)
    assert set(found) == set(Cause)
    assert any("explains nothing" in why for why in found[Cause.instability]) and any(
        "common clip" in why for why in found[Cause.instability]
    )
    assert any("a crash costs 250" in why for why in found[Cause.reward]) and any(
        "without normalisation" in why for why in found[Cause.authority]
    )
    assert not found[Cause.undertraining] and not found[Cause.curriculum]
    decision, because = decide_failing(KNOWN_BAD, written)
    assert decision == Decision.structure and "the critic explains nothing" in because


numbers = st.one_of(st.none(), st.floats(-1e3, 1e3), st.just(math.nan), st.just(math.inf))
rows = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            name: numbers
            for name in (
                "position_error",
                "reward",
                "reward_p95",
                "advantage_mean",
                "advantage_std",
                "explained_variance",
                "log_prob_error",
                "clipped_actions",
                "action_std",
                "approx_kl",
                "clip_fraction",
                "actor_grad_norm",
                "critic_grad_norm",
            )
        },
    ),
    max_size=12,
)
shortfalls = st.lists(
    st.builds(
        Shortfall,
        st.sampled_from(["position_error", "speed", "action_delta_p90", "crash_rate"]),
        st.just("<="),
        st.floats(0, 1),
        st.one_of(st.none(), st.floats(0, 9), st.just("nonsense")),
    ),
    max_size=3,
).map(tuple)
cases = st.builds(
    lambda stage, log, scale, **rest: Case(
        stage, log=[row | {"step": (i + 1) * scale} for i, row in enumerate(log)], examined=EXAMS[stage].families, **rest
    ),
    st.sampled_from(sorted(EXAMS)),
    rows,
    st.sampled_from([1000, 32768, 500_000]),
    metrics=st.one_of(
        st.just({}),
        st.fixed_dictionaries({"finite": st.booleans()}, optional={"action_norm_p90": st.floats(0, 2), "crash_rate": st.floats(0, 1)}),
    ),
    unmet=shortfalls,
    budget=st.integers(0, 10**7),
    extension=st.integers(0, 10**7),
    ppo=st.one_of(
        st.none(), st.fixed_dictionaries({"epochs": st.integers(1, 8), "shared_trunk": st.booleans(), "normalise": st.booleans()})
    ),
    weights=st.one_of(st.none(), st.dictionaries(st.sampled_from(["position", "velocity", "crash"]), st.floats(0, 300))),
    families=st.one_of(st.none(), st.dictionaries(st.sampled_from(["hover", "line", "curve"]), st.floats(0, 9))),
)


@given(cases)
def test_a_fail_always_has_exactly_one_decision_with_a_reason(case):
    decision, because = decide_failing(case, reviews(case))
    assert decision in FAILING and because and "\n" not in because
    assert decide_failing(case, reviews(case)) == (decision, because), "the same case, the same decision"


@given(
    st.booleans(),
    st.lists(st.builds(Condition, st.text(min_size=1, max_size=9), st.booleans(), st.just("it is not")), max_size=6),
    st.booleans(),
)
def test_a_pass_always_has_exactly_one_decision_and_goes_on_only_if_everything_holds(last, conditions, met_planner):
    decision, because = decide_passing(last, conditions, met_planner)
    assert decision in PASSING and because
    assert (decision != Decision.analysis) == (bool(conditions) and all(c.ok for c in conditions))
    assert (decision in (Decision.promote, Decision.long_training)) <= last


def test_the_lists_of_decisions():
    assert [str(d) for d in FAILING] == [
        "continue_same_stage_more_steps",
        "change_tracker_reward_numbers",
        "change_tracker_curriculum_or_eval",
        "launch_tracker_structural_fix",
        "hold_for_user_review",
    ]
    assert [str(d) for d in PASSING] == [
        "continue_same_hypothesis",
        "promote_to_planner_integration",
        "approve_manual_long_training_command",
        "hold_for_more_analysis",
    ]


def test_every_failing_decision_can_be_reached():
    falling = [row | {"position_error": 1.0 / (i + 1)} for i, row in enumerate(SOUND.log)]
    assert decided(replace(SOUND, log=falling)) == Decision.more_steps
    assert decided(replace(SOUND, unmet=(Shortfall("speed", "<=", 0.15, 0.3),))) == Decision.reward_numbers
    assert decided(replace(SOUND, families={"curve": 9.0, "hover": 1.0})) == Decision.curriculum
    assert decided(KNOWN_BAD) == Decision.structure
    assert decided(replace(SOUND, unmet=(Shortfall("crash_rate", "<=", 0.02, 0.05),))) == Decision.user


def test_what_comes_first():
    assert decided(replace(KNOWN_BAD, metrics={})) == Decision.user, "without an exam nobody knows anything"
    assert decided(replace(KNOWN_BAD, log=KNOWN_BAD.log[:3])) == Decision.more_steps and KNOWN_BAD.log[2]["step"] <= TOO_SHORT
    assert decided(replace(SOUND, metrics=SOUND.metrics | {"finite": False})) == Decision.structure
    wrong = [row | {"log_prob_error": 0.1} for row in SOUND.log]
    assert decided(replace(SOUND, log=wrong[:3])) == Decision.structure, "even the shortest run may reject broken code"
    falling = [row | {"position_error": 1.0 / (i + 1)} for i, row in enumerate(SOUND.log)]
    assert decided(replace(SOUND, log=falling, budget=600_000, extension=100_000)) == Decision.user, "no steps are left"
    assert decided(replace(SOUND, unmet=(Shortfall("position_error", "<=", 0.12, None),))) == Decision.reward_numbers, "not measured"


# ---- with runs on disk


def judged(project, stage: str, metrics: dict | None = None, log=LOGS["default"], passing: bool = True, **parameters) -> Run:
    "A run with an exam that just meets (or misses) its limits, judged by the real gate."
    settings = project.settings()
    run, gates = Run.create(settings, stage, parameters, 1).start(), load_gates(settings.gates)
    for row in log:
        run.log(**row)
    limits = gates[stage].gold + gates[stage].passing
    found = (
        {"episodes": 20, "from_checkpoint": True, "finite": True}
        | {r.metric: r.value if passing else 99.0 for r in limits}
        | (metrics or {})
    )
    verdict = check(gates, stage, found)
    run.save_evaluation("exam", {"metrics": found})
    run.save_evaluation("verdict", verdict.to_dict())
    run.finish("passed" if verdict.passed else "failed")
    return run


def test_the_outcome_of_a_failed_run(project):
    run = judged(project, "hover", log=LOGS["known_bad"], passing=False)
    settings = project.settings()
    outcome, written = outcome_of(settings, load_gates(settings.gates), run)
    assert outcome.decision == Decision.structure and not outcome.passed and outcome.command == f"rlnb audit {run.id}" and len(written) == 3
    run.update(decision=outcome.decision)
    assert State.rebuild(settings).open_decision == {"run": run.id, "stage": "hover", "decision": "launch_tracker_structural_fix"}
    judged(project, "hover")
    assert State.rebuild(settings).open_decision is None, "a later pass settles it"


def test_conditions_fail_closed_and_say_which(project):
    settings = project.settings()
    run = judged(project, "hover")
    held = {c.name: c for c in conditions_of(settings, run)}
    assert not held["checkpoint unchanged"].ok and "not on disk" in held["checkpoint unchanged"].why
    assert all(c.ok for name, c in held.items() if name != "checkpoint unchanged")
    project.edit("data/gates.toml", '["crash_rate", "<=", 0.02]', '["crash_rate", "<=", 0.03]')
    moved = {c.name: c for c in conditions_of(settings, run)}["configuration unchanged"]
    assert not moved.ok and "data/gates.toml changed" in moved.why
    outcome, _ = outcome_of(settings, load_gates(settings.gates), run)
    assert outcome.decision == Decision.analysis and "gates.toml" in outcome.because and outcome.command == "rlnb runs"
    silent = judged(project, "point_hold", log=[], metrics={"from_checkpoint": False})
    wrong = {c.name for c in conditions_of(settings, silent) if not c.ok}
    assert wrong == {"gate passed", "numbers from a checkpoint", "signal audit clean", "checkpoint unchanged"}


def test_no_promotion_and_no_long_command_while_a_rung_is_missing(project):
    settings, gates = project.settings(), load_gates(project.settings().gates)
    ladder = [s.name for s in gates.ladder("tracker")]
    assert len(ladder) == 11
    for stage in ladder[:3] + ladder[4:]:
        judged(project, stage)
    top = passed_run(settings, ladder[-1])
    missing = [c for c in promotion_conditions(settings, gates) if not c.ok and c.name.endswith("gate passed")]
    assert [c.name for c in missing] == ["brake_to_point: gate passed"] and "rlnb ladder --until brake_to_point" in missing[0].why
    outcome, _ = outcome_of(settings, gates, top)
    assert outcome.decision == Decision.analysis and "brake_to_point" in outcome.because and "--timesteps" not in outcome.command


def test_an_experiment_is_never_taken_for_the_usual_pass(project):
    run = judged(project, "hover")
    judged(project, "hover", recipe="known_bad")
    assert passed_run(project.settings(), "hover").id == run.id and passed_run(project.settings(), "point_hold") is None


def test_a_handed_on_checkpoint_is_audited_where_it_was_trained(project):
    first, second = judged(project, "hover"), judged(project, "point_hold", log=[])
    (first.checkpoints / "100").mkdir()
    second.save_evaluation("best", {"checkpoint": str(first.checkpoints / "100")})
    assert trained_in(second).id == first.id and trained_in(first).id == first.id


def test_words_on_the_command_line(project):
    settings, none = project.settings(), SimpleNamespace(run=None, stage=None)
    for options, words in (
        (none, "name one run"),
        (SimpleNamespace(run="a", stage="hover"), "name one run"),
        (SimpleNamespace(run=None, stage="hover"), "no run of hover has been judged"),
        (SimpleNamespace(run=None, stage="hoover"), "unknown stage 'hoover'"),
        (SimpleNamespace(run="x", stage=None), "no such run"),
    ):
        with pytest.raises(LabError, match=words):
            chosen_run(settings, options)
    run = judged(project, "hover", passing=False)
    assert chosen_run(settings, SimpleNamespace(run=None, stage="hover")).id == run.id
    wrong = project.rlnb("review", "--stage", "hoover")
    assert wrong.returncode == 1 and wrong.stderr.count("\n") == 1 and "hover" in wrong.stderr


def test_audit_leaves_the_run_as_it_was(project):
    "The real notebook on a real log, in its own kernel."
    import shutil

    for name in ("signal_audit", "tracker_review"):
        shutil.copy(ROOT / "nbs" / "stages" / f"{name}.ipynb", project.root / "nbs" / "stages")
    run = judged(project, "hover", log=LOGS["known_bad"], passing=False)
    before = run.record
    done = project.rlnb("audit", run.id)
    assert done.returncode == 2 and "the critic explains nothing" in done.stdout, done.stderr
    done = project.rlnb("review", "--stage", "hover")
    assert done.returncode == 2 and "decision: launch_tracker_structural_fix" in done.stdout, done.stderr
    after = run.record
    assert {k: after[k] for k in ("status", "started", "ended", "error")} == {k: before[k] for k in ("status", "started", "ended", "error")}
    assert after["decision"] == "launch_tracker_structural_fix" and not (run.folder / "lock").exists()
    page = (project.root / "reports" / "site" / "packets" / run.id / "tracker_review.html").read_text()
    assert "launch_tracker_structural_fix" in page and "the critic explains nothing" in page


# ---- the recipe itself


def test_gradients_of_a_common_trunk():
    from rlnb.tracker.ppo import joined, with_trunk

    def network(seed: int, last: int) -> dict:
        draw = np.random.default_rng(seed)
        return {"params": {f"Dense_{i}": {"kernel": jnp.array(draw.normal(size=(3, width)))} for i, width in enumerate((3, 3, last))}}

    actor, critic, log_std = network(0, 4), network(9, 1), jnp.ones(4)
    (got_actor, _), got_critic = joined((actor, log_std), critic, 1e9)  # a clip that never bites
    for layer in ("Dense_0", "Dense_1"):
        together = actor["params"][layer]["kernel"] + critic["params"][layer]["kernel"]
        np.testing.assert_allclose(got_actor["params"][layer]["kernel"], together, rtol=1e-6)
        np.testing.assert_array_equal(got_actor["params"][layer]["kernel"], got_critic["params"][layer]["kernel"])
    np.testing.assert_array_equal(got_critic["params"]["Dense_2"]["kernel"], critic["params"]["Dense_2"]["kernel"])
    clipped_actor, clipped_critic = joined((actor, log_std), critic, 0.5)
    whole = optax.global_norm((clipped_actor, clipped_critic["params"]["Dense_2"]))  # the trunk counts once
    np.testing.assert_allclose(whole, 0.5, rtol=1e-5)
    tied = with_trunk(critic, actor)["params"]
    assert tied["Dense_0"] is actor["params"]["Dense_0"] and tied["Dense_2"] is critic["params"]["Dense_2"]


def test_recipes_by_name():
    from rlnb.tracker.ppo import PPOConfig
    from rlnb.tracker.recipes import find_recipe
    from rlnb.tracker.rewards import ReferenceCommandReward

    assert find_recipe("default").ppo == PPOConfig() and find_recipe("default").weights == ReferenceCommandReward()
    bad = find_recipe("known_bad")
    assert bad.weights.crash == 250 and bad.weights.position == 3
    assert (bad.ppo.epochs, bad.ppo.normalise, bad.ppo.shared_trunk) == (1, False, True)
    with pytest.raises(ValueError, match="unknown recipe 'good': choose from default, known_bad"):
        find_recipe("good")
