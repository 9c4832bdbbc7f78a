"""Packets: their words follow from the numbers, and nothing that comes from outside becomes markup."""
import html.parser
import math

import matplotlib
import nbformat
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from rlnb.lab.gates import check, load_gates
from rlnb.lab.packets import (
    closest_call,
    command_block,
    decision,
    environment_table,
    external,
    figure,
    gate_table,
    has_formulas,
    metrics_table,
    next_command,
    parameter_table,
    reader_note,
    status_header,
    table,
    to_html,
    used,
)

matplotlib.use("agg")
GATES = load_gates(ROOT / "data" / "gates.toml")
EVIL = "</td><script>alert(1)</script><img src=x onerror=alert(1)>'\""


class Tags(html.parser.HTMLParser):
    "Collects the tags of a piece of HTML and checks that they are closed in order."

    VOID = frozenset({"img", "br", "meta", "link", "input", "hr"})

    def __init__(self, text: str):
        super().__init__()
        self.seen, self.open, self.attributes = [], [], []
        self.feed(text)
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in self.VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def exam_of(name: str, factor: float = 0.9) -> dict:
    "An exam in which every upper limit is used up to `factor`."
    stage = GATES[name]
    metrics = {"episodes": stage.episodes, "from_checkpoint": True, "finite": True}
    for limit in stage.gold + stage.passing:
        upper = limit.op in ("<=", "<") and not isinstance(limit.value, bool)
        metrics[limit.metric] = limit.value * factor if upper else limit.value
    return metrics


def test_nothing_from_outside_becomes_markup():
    record = {"id": EVIL, "stage": EVIL, "status": "crashed", "error": EVIL, "seeds": [1], "command": EVIL, "host": EVIL,
              "packages": {EVIL: EVIL}, "config_hashes": {EVIL: EVIL}, "git": {"commit": EVIL}, "parameters": {EVIL: EVIL}}
    blocks = [status_header(record, None), parameter_table({EVIL: EVIL}, {EVIL: EVIL}), environment_table(record),
              metrics_table({EVIL: EVIL, "a": {EVIL: 1}}, {EVIL: EVIL}), command_block(record, [1]), next_command(EVIL, EVIL),
              table((EVIL,), [(EVIL,)])]
    for block in blocks:
        tags = Tags(block._repr_html_())
        assert not {"script", "img"} & set(tags.seen) and "onerror" not in tags.attributes
        assert EVIL in str(block) or EVIL[:60] in str(block), "in plain text it stays as it is"


@pytest.mark.parametrize("name", list(GATES.stages))
@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 50.0])
def test_every_stage_can_be_reported(name, factor):
    metrics = exam_of(name, factor)
    verdict = check(GATES, name, metrics)
    assert verdict.passed == (factor <= 1 or all(limit.value == 0 or limit.op not in ("<=", "<") for limit in GATES[name].passing))
    blocks = [status_header({"id": "x", "stage": name, "status": "passed"}, verdict, metrics), gate_table(verdict),
              metrics_table(metrics, GATES.metrics), reader_note(verdict, metrics, "zh"), decision(verdict, GATES[name].next)]
    for block in blocks:
        Tags(block._repr_html_())
        assert str(block).strip()
    note = str(blocks[3])
    assert ("the stage is passed" in note) == verdict.passed and ("本阶段通过" in note) == verdict.passed
    assert ("stays locked" in str(blocks[4])) == (not verdict.passed)
    for reason in verdict.reasons:
        assert reason in note, "every reason is told"


@given(st.dictionaries(st.sampled_from([limit.metric for limit in GATES["hover"].passing] + ["episodes", "finite", "from_checkpoint"]),
                       st.one_of(st.floats(), st.integers(-5, 50), st.booleans(), st.none(), st.just("0.1"), st.just([1]))))
def test_any_exam_can_be_reported_and_no_note_claims_a_pass_that_is_none(metrics):
    verdict = check(GATES, "hover", metrics)
    header = status_header({"id": "x", "stage": "hover", "status": "failed"}, verdict, metrics)
    Tags(header._repr_html_())
    note = str(reader_note(verdict, metrics, "zh"))
    assert ("the stage is passed" in note) == verdict.passed
    if not verdict.passed:
        assert "All limits of the gold column" not in note or all(r.ok for r in verdict.gold_rows)


def test_the_closest_call_is_the_tightest_limit_that_is_met():
    metrics = {**exam_of("hover", 0.5), "action_delta": 0.21, "crash_rate": 0.0, "success_rate": 1.0}
    row, share = closest_call(check(GATES, "hover", metrics))
    assert row.metric == "action_delta" and share == pytest.approx(0.21 / 0.22)
    row, share = closest_call(check(GATES, "hover", {**metrics, "success_rate": 0.951}))
    assert row.metric == "success_rate" and share == pytest.approx(0.98)


@given(st.sampled_from(["<=", ">=", "==", "<", ">"]), st.floats(), st.floats(), st.booleans())
def test_shares_are_finite_or_none(op, limit, value, rate):
    share = used(op, limit, value, rate)
    assert share is None or not math.isnan(share)


def test_a_figure_needs_words():
    import matplotlib.pyplot as plt

    fig, _ = plt.subplots()
    with pytest.raises(ValueError, match="alternative text"):
        figure(fig, "  ")
    block = figure(fig, EVIL, thumbnail=True)
    assert Tags(block._repr_html_()).seen == ["figure", "img"] and not plt.fignum_exists(fig.number)


@pytest.mark.parametrize("text, formula", [
    ("$x^2$", True), ("so $$\\int f$$ it is", True), ("\\(x\\)", True), ("\\begin{align}", True), ("it costs $5 and $6", False),
    ("`$HOME`", False), ("", False)])
def test_formulas_are_told_from_dollars(text, formula):
    assert has_formulas(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])) is formula


def test_every_kind_of_output_is_shown(tmp_path):
    new = nbformat.v4.new_output
    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    outputs = [new("stream", text="<b>printed</b>"), new("display_data", {"image/png": png}),
               new("display_data", {"image/svg+xml": "<svg/>"}), new("display_data", {"text/markdown": "**bold**"}),
               new("display_data", {"text/latex": "$a<b$"}), new("execute_result", {"text/plain": "<b>plain</b>"}),
               new("display_data", {"application/javascript": "alert(1)"}),
               new("error", ename="E", evalue="<b>", traceback=["\x1b[31mE: <b>\x1b[0m"])]
    cell = nbformat.v4.new_code_cell("if a < b: pass", outputs=outputs, metadata={"alt": "A dot"})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell, nbformat.v4.new_raw_cell("<b>raw</b>")]), tmp_path / "n.ipynb")
    page = to_html(tmp_path / "n.ipynb", tmp_path / "n.html", "T").read_text()
    Tags(page)
    assert page.count("alt=\"A dot\"") == 2 and "<strong>bold</strong>" in page and "alert(1)" not in page
    for word in ("printed", "plain", "raw"):
        assert f"&lt;b&gt;{word}&lt;/b&gt;" in page
    assert "E: &lt;b&gt;" in page and external(page) == []
