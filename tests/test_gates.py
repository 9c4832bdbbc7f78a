"""The gate fails closed, whatever it is given."""
import json
import math

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from rlnb.lab.errors import LabError
from rlnb.lab.gates import OPS, Budget, Gates, Limit, Stage, Verdict, check, has_passed, load_gates

GATES = load_gates(ROOT / "data" / "gates.toml")
NAMES = ("alpha", "beta", "gamma")
METRICS = {name: {"unit": "m", "label": name} for name in NAMES}
FINE = {"episodes": 20, "from_checkpoint": True, "finite": True}

numbers = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.integers(-10, 10))
words = st.sampled_from(["", "0", "NaN", "yes"])
junk = st.one_of(numbers, st.booleans(), st.none(), words, st.lists(st.integers(), max_size=2), st.just(10**400))
limits = st.builds(Limit, st.sampled_from(NAMES), st.sampled_from(sorted(OPS)), st.one_of(st.floats(-10, 10), st.booleans()))
metrics = st.dictionaries(st.sampled_from([*NAMES, "episodes", "from_checkpoint", "finite"]), junk)
good_metrics = st.fixed_dictionaries({name: st.floats(-10, 10) for name in NAMES}).map(lambda m: {**FINE, **m})


def gates_of(passing, gold=(), prerequisite=None) -> Gates:
    first = Stage("first", 1, "tracker", 20, Budget(1, 1, 1), tuple(passing), tuple(gold), prerequisite)
    return Gates({"first": first}, METRICS)


@given(st.lists(limits, min_size=1, max_size=4), metrics)
def test_whatever_comes_in_a_pass_means_that_every_limit_is_met(passing, found):
    verdict = check(gates_of(passing), "first", found)
    if verdict.passed:
        assert found["episodes"] >= 20 and found["from_checkpoint"] is True and found["finite"] is True
        for limit in passing:
            value = found[limit.metric]
            assert isinstance(value, bool) == isinstance(limit.value, bool) and OPS[limit.op](value, limit.value)
            assert isinstance(value, bool) or math.isfinite(value)
    else:
        assert verdict.reasons and not verdict.gold


@given(st.lists(limits, min_size=1, max_size=4), st.one_of(metrics, good_metrics), st.sampled_from([*NAMES, *FINE]))
def test_removing_a_metric_never_turns_a_fail_into_a_pass(passing, found, gone):
    gates = gates_of(passing)
    before, after = check(gates, "first", found), check(gates, "first", {k: v for k, v in found.items() if k != gone})
    assert before.passed or not after.passed


@given(st.lists(limits, min_size=1, max_size=4), good_metrics, st.floats(0, 5))
def test_loosening_a_threshold_never_turns_a_pass_into_a_fail(passing, found, slack):
    def looser(limit):
        if isinstance(limit.value, bool) or limit.op == "==":
            return limit
        return Limit(limit.metric, limit.op, limit.value + (slack if limit.op in ("<=", "<") else -slack))
    before = check(gates_of(passing, passing), "first", found)
    after = check(gates_of(map(looser, passing), map(looser, passing)), "first", found)
    assert not before.passed or after.passed
    assert not before.gold or after.gold


@given(st.lists(limits, min_size=1, max_size=4), st.lists(limits, max_size=4), good_metrics)
def test_a_verdict_survives_json(passing, gold, found):
    verdict = check(gates_of(passing, gold), "first", found)
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict


@pytest.mark.parametrize("name", list(GATES.stages))
def test_every_stage_of_the_file_can_be_passed_and_misses_each_single_metric(name):
    stage = GATES[name]
    perfect = {**FINE, "episodes": stage.episodes, **{limit.metric: limit.value for limit in stage.passing + stage.gold}}
    assert check(GATES, name, perfect).passed
    assert check(GATES, name, perfect).gold == bool(stage.gold)
    for gone in perfect.keys() - {limit.metric for limit in stage.gold} | {limit.metric for limit in stage.passing}:
        assert not check(GATES, name, {k: v for k, v in perfect.items() if k != gone}).passed, gone
    for limit in stage.passing:
        for bad in (math.nan, math.inf, -math.inf, None, "0", [0.0]):
            verdict = check(GATES, name, {**perfect, limit.metric: bad})
            assert not verdict.passed and any(limit.metric in reason for reason in verdict.reasons)


def test_the_ladder_is_the_one_of_the_specification():
    assert [s.name for s in GATES.ladder()] == [
        "hover", "point_hold", "point_reach", "brake_to_point", "line_tracking", "heading_tracking", "multi_point_reference",
        "l_shape_tracking", "curve_tracking", "zigzag_or_lemniscate_tracking", "reference_command_no_gate_reward",
        "planner_integration_smoke"]
    for before, after in zip(GATES.ladder(), GATES.ladder()[1:]):
        assert before.next == after.name and after.prerequisite == before.name
    for stage in GATES.ladder():  # gold is never looser than the pass column
        for limit in stage.gold:
            for other in (o for o in stage.passing if o.metric == limit.metric and o.op in ("<=", ">=")):
                assert limit.value <= other.value if other.op == "<=" else limit.value >= other.value


@pytest.mark.parametrize("history, passed", [
    (None, False), ([], False), ({}, False), ("hover", False), (3, False), ([None, 3], False), ({"hover": False}, False),
    ({"hover": 1}, False),
    ([{"stage": "hover", "status": "failed"}], False), ([{"stage": "point_hold", "status": "passed"}], False),
    ({"hover": True}, True), ({"hover": "passed"}, True), ([{"stage": "hover", "passed": True}], True),
    ([{"stage": "hover", "status": "passed"}, {"stage": "hover", "status": "failed"}], True)])
def test_prerequisites(history, passed):
    assert has_passed(history, "hover") is passed
    stage = GATES["point_hold"]
    perfect = {**FINE, **{limit.metric: limit.value for limit in stage.passing}}
    assert check(GATES, "point_hold", perfect, history, require_prerequisites=True).passed is passed
    assert check(GATES, "point_hold", perfect, history).passed


BUDGET = "budget = { default = 1_000_000, extension = 5_000_000, checkpoint_every = 250_000 }"
TYPOS = {
    "epsiodes = 20": ("episodes = 20", "unknown key 'epsiodes'"),
    "kind = 'trakcer'": ('kind = "tracker"', "unknown kind 'trakcer'"),
    "episodes = '20'": ("episodes = 20", "must be a whole number"),
    "episodes = 0": ("episodes = 20", "too small"),
    "episodes = true": ("episodes = 20", "must be a whole number"),
    "order = 2": ("order = 1", "is taken by"),
    "budget = 5": (BUDGET, "must be a table"),
    "budget = { default = 1, extension = 5 }": (BUDGET, "checkpoint_every is missing"),
    '["crash_rate", "<=", nan]': ('["crash_rate", "<=", 0.02]', "finite number"),
    '["crash_rate", "<=", true]': ('["crash_rate", "<=", 0.02]', "finite number"),
    '["crash_rate", "<=", "0.02"]': ('["crash_rate", "<=", 0.02]', "finite number"),
    '["crash_rate", "≤", 0.02]': ('["crash_rate", "<=", 0.02]', "unknown op"),
    '["crash_rate", 0.02]': ('["crash_rate", "<=", 0.02]', "must read [metric, op, value]"),
    '[["crash_rate"], "<=", 0.02]': ('["crash_rate", "<=", 0.02]', "unknown metric"),
    '["crahs_rate", "<=", 0.02]': ('["crash_rate", "<=", 0.02]', "did you mean 'crash_rate'"),
    'prerequisite = "hoover"': ('prerequisite = "hover"', "did you mean 'hover'"),
    'prerequisite = "point_reach"': ('prerequisite = "hover"', "does not"),
    'next = "nowhere"': ('next = "point_hold"', "unknown stage 'nowhere'"),
    "order = ": ("order = 1", "Invalid value"),
    "[stagse.hover]": ("[stages.hover]", "unknown key 'stagse'"),
}


@pytest.mark.parametrize("after", TYPOS)
def test_a_typo_in_the_gate_file_is_one_line_that_names_the_place(project, after):
    before, expected = TYPOS[after]
    project.edit("data/gates.toml", before, after)
    with pytest.raises(LabError) as caught:
        load_gates(project.root / "data" / "gates.toml")
    assert "gates.toml" in str(caught.value) and expected in str(caught.value) and "\n" not in str(caught.value)
    done = project.rlnb("ladder", "--until", "hover")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and expected in done.stderr
    assert not project.records(), "nothing was started"


def exam(project, **changes) -> str:
    "Path of a metrics file: the example with changes."
    content = {**json.loads((ROOT / "tests" / "data" / "hover_exam.json").read_text()), **changes}
    path = project.root / "exam.json"
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize("changes, code, words", [
    ({}, 0, "passed"), ({"crash_rate": 0.5}, 2, "crash_rate is 0.5"), ({"crash_rate": math.nan}, 2, "crash_rate is nan"),
    ({"crash_rate": "NaN"}, 2, "crash_rate"), ({"crash_rate": "0"}, 2, "not a number"), ({"episodes": 19}, 2, "only 19 episodes"),
    ({"from_checkpoint": 1}, 2, "from a checkpoint"), ({"finite": None}, 2, "finite")])
def test_the_gate_command(project, changes, code, words):
    done = project.rlnb("gate", "--stage", "hover", "--metrics-json", exam(project, **changes))
    assert done.returncode == code and words in done.stdout and not done.stderr


@pytest.mark.parametrize("content", ["", "[1, 2]", "3", "{", "null"])
def test_the_gate_command_with_unusable_input(project, content):
    (project.root / "bad.json").write_text(content)
    done = project.rlnb("gate", "--stage", "hover", "--metrics-json", "bad.json")
    assert done.returncode == 1 and done.stderr.startswith("rlnb: error: ") and done.stderr.count("\n") == 1 and "bad.json" in done.stderr


def test_the_gate_command_with_history(project):
    stage = GATES["point_hold"]
    (project.root / "m.json").write_text(json.dumps({**FINE, **{limit.metric: limit.value for limit in stage.passing}}))
    (project.root / "h.json").write_text(json.dumps([{"stage": "hover", "status": "passed"}]))
    common = ("gate", "--stage", "point_hold", "--metrics-json", "m.json")
    assert project.rlnb(*common, "--require-prerequisites").returncode == 2
    assert project.rlnb(*common, "--require-prerequisites", "--history-json", "h.json").returncode == 0
    assert project.rlnb(*common, "--history-json", "nowhere.json").returncode == 1
    assert project.rlnb("gate", "--stage", "hoover", "--metrics-json", "m.json").returncode == 1
