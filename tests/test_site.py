"""The site in a real browser: it loads, filters and opens packets, without one request that leaves the machine."""
import math
import warnings
from pathlib import Path

import browser
import matplotlib
import nbformat
import pytest

from rlnb.lab.gates import check, load_gates
from rlnb.lab.packets import external, figure, gate_table, metrics_table, reader_note, status_header
from rlnb.lab.runs import Run
from rlnb.lab.site import publish

matplotlib.use("agg")
EVIL = "<img src=x onerror=\"document.title='broken in'\"><script>document.title='broken in'</script>"
EXAM = {"episodes": 20, "from_checkpoint": True, "finite": True, "success_rate": 1.0, "crash_rate": 0.0, "position_error": 0.021,
        "position_error_p90": 0.048, "speed": 0.034, "action_delta": 0.061}


def make_run(settings, stage: str, seed: int, status: str, metrics=None, error=None, cells=()) -> Run:
    "A finished run with two packets as the stage notebooks make them."
    import matplotlib.pyplot as plt

    gates = load_gates(settings.gates)
    run = Run.create(settings, stage, {"note": EVIL}, seed).start()
    verdict = check(gates, stage, metrics) if metrics else None
    blocks = [status_header(run.record, verdict, metrics)]
    if verdict:
        run.save_evaluation("verdict", verdict.to_dict())
        fig, ax = plt.subplots(figsize=(6, 3))
        ax.semilogy([1, 2, 3, 4], [50, 10, 4, 2])
        blocks += [figure(fig, f"Learning curve of {stage}", thumbnail=True), gate_table(verdict), metrics_table(metrics, gates.metrics),
                   reader_note(verdict, metrics, "zh")]
    run.finish(status, error)
    for name in ("tracker_train", "tracker_exam"):
        outputs = [nbformat.v4.new_output("display_data", {"text/html": b._repr_html_(), "text/plain": str(b)}) for b in blocks]
        outputs += [nbformat.v4.new_output("stream", name="stdout", text=f"printed {EVIL}\n" + "wide " * 100),
                    nbformat.v4.new_output("error", ename="ValueError", evalue=EVIL, traceback=[f"\x1b[31mValueError\x1b[0m: {EVIL}"])]
        code = [nbformat.v4.new_code_cell("x = 1\n" * 3, outputs=outputs, execution_count=1), *cells]
        path = settings.packets / run.id / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"# {stage}\n\n> What it is for."), *code]), path)
    return run


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "A published site: passed, not passed, crashed, held."
    from conftest import Project

    settings = Project(tmp_path_factory.mktemp("site") / "project").settings()
    runs = [make_run(settings, "hover", 1, "passed", EXAM),
            make_run(settings, "hover", 2, "failed", {**EXAM, "crash_rate": 0.4, "speed": math.nan}, "gate: crash_rate is 0.4"),
            make_run(settings, "point_hold", 1, "crashed", error=f"kernel died {EVIL}"),
            make_run(settings, "point_hold", 3, "held")]
    return settings, runs, publish(settings)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    if not browser.find():
        reason = "NO BROWSER: the site was not tested in Chromium; install it with 'apt-get install chromium'"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    page = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


def fits(chromium) -> bool:
    "Whether the page is no wider than the window."
    return chromium.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def shown(chromium) -> list[str]:
    return chromium.run("Array.from(document.querySelectorAll('table.runs tbody tr:not([hidden]) .id'), e => e.textContent)")


def choose(chromium, name: str, value: str) -> None:
    chromium.run(f"(() => {{ const e = document.querySelector('form.filters').elements[{name!r}]; e.value = {value!r};"
                 "e.dispatchEvent(new Event('input', {bubbles: true})); })()")


def test_every_published_page_is_free_of_external_requests(site):
    settings, _, _ = site
    pages = list(settings.site.rglob("*.html"))
    assert len(pages) == 9
    for page in pages:
        text = page.read_text()
        assert external(text) == [] and "Content-Security-Policy" in text
        assert "<img src=x" not in text and "<script>document" not in text, page


def test_the_index_filters_sorts_and_opens_packets(site, chromium):
    _, runs, index = site
    chromium.look(1200)
    chromium.open(index.as_uri())
    assert chromium.run("document.title") == "Runs"
    assert set(shown(chromium)) == {run.id for run in runs}
    choose(chromium, "stage", "hover")
    assert set(shown(chromium)) == {runs[0].id, runs[1].id}
    choose(chromium, "verdict", "passed")
    assert shown(chromium) == [runs[0].id] and chromium.run("document.getElementById('count').textContent") == "1 of 4 runs"
    choose(chromium, "seed", "3")
    assert shown(chromium) == [] and chromium.run("!document.querySelector('.empty').hidden")
    chromium.run("document.querySelector('form.filters button[type=reset]').click()")
    chromium.run("new Promise(done => setTimeout(done, 50))")
    assert len(shown(chromium)) == 4
    choose(chromium, "text", "kernel died")
    assert shown(chromium) == [runs[2].id]
    choose(chromium, "text", "")
    choose(chromium, "from", "2999-01-01")
    assert shown(chromium) == []
    choose(chromium, "from", "")
    chromium.run("document.querySelector('button[data-key=seed]').click()")
    assert chromium.run("Array.from(document.querySelectorAll('table.runs tbody tr'), r => r.dataset.seed)") == ["1", "1", "2", "3"]
    chromium.run("document.querySelector('button[data-key=seed]').click()")
    assert chromium.run("document.querySelector('table.runs tbody tr').dataset.seed") == "3"
    assert chromium.run("document.querySelector('table.runs th[aria-sort]').getAttribute('aria-sort')") == "descending"
    assert chromium.run("Array.from(document.images).every(i => i.complete && i.naturalWidth > 0)"), "every picture is there"

    packet = chromium.run(f"Array.from(document.querySelectorAll('td.links a')).find(a => a.href.includes({runs[0].id!r})).href")
    chromium.open(packet)
    assert "Passed" in chromium.run("document.querySelector('.status').textContent")
    assert chromium.run("document.querySelector('details.source').open") is False
    assert chromium.run("document.querySelector('nav.top a').href") == index.as_uri()
    assert chromium.run("getComputedStyle(document.querySelector('.gauge i')).width") != "0px"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1200])
def test_pages_are_readable_at_any_width_and_in_the_dark(site, chromium, width, dark):
    settings, runs, index = site
    chromium.look(width, dark=dark)
    for page in (index, *(settings.site / "packets" / run.id / "tracker_exam.html" for run in runs)):
        chromium.open(page.as_uri())
        assert fits(chromium), f"{page.name} is wider than {width}"
        # The contrast of text against its page, as the accessibility guidelines define it.
        ratio = chromium.run("""(() => {
            const linear = x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
            const light = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => linear(x / 255));
                                 return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };
            const paper = light(getComputedStyle(document.body).backgroundColor);
            const ratio = e => { const a = light(getComputedStyle(e).color);
                                 return (Math.max(a, paper) + .05) / (Math.min(a, paper) + .05); };
            return Math.min(...Array.from(document.querySelectorAll('p, td, th, h1, h2, small, a, dt, dd, label')).map(ratio)); })()""")
        assert ratio >= 4.5, f"contrast {ratio:.2f} in {page.name}"
        paper = chromium.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, paper[4:-1].split(","))) < 200) == dark
        assert chromium.run("Array.from(document.images).every(i => i.alt.trim().length > 0)"), "figures have alternative text"


def test_nothing_left_the_machine_and_nothing_failed(site, chromium):
    "Runs last: everything the browser asked for while it was shown all pages."
    settings, runs, _ = site
    for run in runs:
        for page in sorted((settings.site / "packets" / run.id).glob("*.html")):
            chromium.open(page.as_uri())
            assert chromium.run("document.title") != "broken in", "markup in a name or an error became markup"
    outside = [url for url in chromium.requests if not url.startswith(("file://", "data:", "about:"))]
    assert outside == [] and chromium.failed == [] and chromium.errors == []
    assert sum(url.startswith("file://") for url in chromium.requests) > 10, "the notebook of requests works"


def test_a_policy_stops_what_a_packet_wants_to_load(site, chromium, tmp_path):
    "Even a packet that tries does not reach the network: the browser refuses."
    from rlnb.lab.packets import to_html

    wants = nbformat.v4.new_output("display_data", {"text/html": "<img alt=spy src='http://127.0.0.1:9/spy.png'>"})
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x", outputs=[wants])])
    nbformat.write(notebook, tmp_path / "spy.ipynb")
    page = to_html(tmp_path / "spy.ipynb", tmp_path / "spy.html", "Spy")
    before = len(chromium.requests)
    chromium.open(page.as_uri())
    chromium.run("new Promise(done => setTimeout(done, 200))")
    blocked = [f for f in chromium.failed if f.get("blockedReason") == "csp"]
    sent = [u for u in chromium.requests[before:] if "spy.png" in u]
    assert len(blocked) == len(sent), "it was asked for at most to be refused"
    assert any("Content Security Policy" in str(e) for e in chromium.errors)


def test_unchanged_packets_are_not_converted_again_and_gone_ones_go(project):
    settings = project.settings()
    first, second = make_run(settings, "hover", 1, "passed", EXAM), make_run(settings, "hover", 2, "crashed", error="x")
    heard: list[str] = []
    publish(settings, heard.append)
    assert len(heard) == 4
    publish(settings, heard.append)
    assert len(heard) == 4
    second.update(error="another reason")
    publish(settings, heard.append)
    assert len(heard) == 6 and all(second.id in line for line in heard[4:])
    for path in (settings.packets / second.id).iterdir():
        path.unlink()
    publish(settings, heard.append)
    assert not (settings.site / "packets" / second.id).exists() and (settings.site / "packets" / first.id).exists()
    (settings.site / "manifest.json").write_text("{")
    publish(settings, heard.append)
    assert len(heard) == 8, "without the manifest everything is converted"


def test_a_packet_that_cannot_be_read_has_a_page_that_says_so(project):
    settings = project.settings()
    run = make_run(settings, "hover", 1, "crashed", error="the disk was full")
    (settings.packets / run.id / "tracker_exam.ipynb").write_text('{"cells": [')
    publish(settings)
    assert "cannot be shown" in (settings.site / "packets" / run.id / "tracker_exam.html").read_text()


def test_mathjax_comes_along_only_for_formulas(project, chromium):
    settings = project.settings()
    make_run(settings, "hover", 1, "passed", EXAM)
    index = publish(settings)
    assert not (settings.site / "mathjax").exists()
    run = make_run(settings, "hover", 2, "passed", EXAM, cells=[nbformat.v4.new_markdown_cell("The error is $e = |p - r|$.")])
    publish(settings)
    page = (settings.site / "packets" / run.id / "tracker_exam.html").read_text()
    assert (settings.site / "mathjax" / "MathJax.js").exists() and 'src="../../mathjax/MathJax.js' in page and external(page) == []
    assert Path(index).exists()
    chromium.requests.clear()
    failed = len(chromium.failed)
    chromium.open((settings.site / "packets" / run.id / "tracker_exam.html").as_uri())
    chromium.run("new Promise(done => MathJax.Hub.Queue(done))")
    assert chromium.run("document.querySelectorAll('.MathJax, .MathJax_CHTML, mjx-chtml, .mjx-chtml').length") > 0, "the formula is set"
    assert all(url.startswith(("file://", "data:", "about:")) for url in chromium.requests)
    assert not [f for f in chromium.failed[failed:] if f.get("blockedReason") != "csp"], "its fonts are there"
