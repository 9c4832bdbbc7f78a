"""The search: what it survives, what it refuses, and that it finds something."""
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import search_tools
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from rlnb.car.champion import ChampionTracker
from rlnb.lab.errors import LabError
from rlnb.lab.publishing import Publisher, git
from rlnb.lab.runs import Process, this_process, write_json
from rlnb.lab.search import RESULTS, Study, append_line, confirm, confirmed, holding, open_study, propose, search, settle, whole_lines
from rlnb.lab.spaces import Parameter, load_space

optuna = pytest.importorskip("optuna")
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    "Trials are processes of their own and have to find the objectives of these tests."
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(ROOT)]))


def study(folder: Path, objective: str = "HILL", deadline: float = 60, **options) -> Study:
    crown = ChampionTracker(folder / "study", lambda line: None).update_if_better
    space = load_space(search_tools.write_space(folder, objective, deadline))
    return Study(space, folder / "study", crown=crown, say=lambda line: None, **options)


def check_consistent(found: Study) -> list[dict]:
    "Results, journal, folders and champion tell the same story; returns the results."
    rows = found.results()
    numbers = [row["trial"] for row in rows]
    assert len(set(numbers)) == len(numbers), "a trial number stands twice"
    assert all(json.loads(line) for line in found.results_file.read_text().splitlines()), "a line is not whole"
    best = -math.inf
    for row in rows:
        assert row["champion"] == (row["status"] == "ok" and row["mean_reward"] > best)
        best = max(best, row["mean_reward"] if row["status"] == "ok" else best)
    states = {t.number: t for t in open_study(found).get_trials(deepcopy=False)}
    assert set(numbers) == {n for n, t in states.items() if t.state.is_finished()}
    for row in rows:
        told = states[row["trial"]]
        assert (told.state == optuna.trial.TrialState.COMPLETE) == (row["status"] == "ok")
        assert row["status"] != "ok" or told.value == row["mean_reward"]
    champion = found.best()
    manifest = json.loads((found.folder / "champion" / "manifest.json").read_text())
    assert (manifest["trial"], manifest["mean_reward"]) == (champion["trial"], champion["mean_reward"])
    assert (found.folder / "champion" / "model.zip").read_bytes() == (found.folder / champion["model_path"]).read_bytes()
    return rows


def processes_of(folder: Path) -> list[int]:
    "Living processes that were started for a folder."
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        named = any(str(folder) in word for word in process.info["cmdline"] or ())
        if named and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found.append(process.pid)
    return found


WORKER = """
import sys
from pathlib import Path
from rlnb.car.champion import ChampionTracker
from rlnb.lab.search import Study, search
from rlnb.lab.spaces import load_space
folder = Path(sys.argv[2])
search(Study(load_space(Path(sys.argv[1])), folder, crown=ChampionTracker(folder).update_if_better), int(sys.argv[3]))
"""


def worker(folder: Path, trials: int, objective: str = "HILL") -> subprocess.Popen:
    "A process that works on the study of a folder."
    words = [search_tools.write_space(folder, objective), folder / "study", trials]
    return subprocess.Popen([sys.executable, "-c", WORKER, *map(str, words)], stdout=subprocess.DEVNULL)


# ---- killed

def test_killed_twenty_times_in_a_row(tmp_path):
    "Real kills at random moments: no number twice, nothing finished is lost, no half line counts, the champion is right."
    done = subprocess.run([sys.executable, HERE / "search_tools.py", tmp_path, "20"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(seen) == 20
    for before, after in itertools.pairwise(seen):
        assert after[:len(before)] == before, "what was there has changed"
    rows = check_consistent(study(tmp_path))
    assert [row["trial"] for row in rows][:len(seen[-1])] == seen[-1]
    statuses = Counter(row["status"] for row in rows)
    assert set(statuses) <= {"ok", "abandoned"} and statuses["ok"] >= 4 and statuses["abandoned"] >= 4, statuses
    lines = {row["trial"]: row for row in rows}
    for left in (tmp_path / "study").glob("trial-*/result.json"):
        result, row = json.loads(left.read_text()), lines[int(left.parent.name[6:])]
        assert row["status"] == "abandoned" or row["mean_reward"] == result["mean_reward"]
    good = [row["sampler"] for row in rows if row["status"] == "ok"]
    assert good[:3] == ["random"] * 3
    until = time.monotonic() + 10
    while processes_of(tmp_path) and time.monotonic() < until:
        time.sleep(0.2)
    assert processes_of(tmp_path) == [], "trials outlive their controllers"


def test_a_trial_ends_with_its_controller(tmp_path):
    controller = worker(tmp_path, 1, "SLOW")
    until = time.monotonic() + 60
    while not (trials := [p for p in processes_of(tmp_path / "study" / "trial-0000") if p != controller.pid]) and time.monotonic() < until:
        time.sleep(0.1)
    assert trials
    controller.kill()
    controller.wait()
    _, alive = psutil.wait_procs([psutil.Process(p) for p in trials if psutil.pid_exists(p)], timeout=20)
    assert not alive


def left_behind(found: Study, result: dict | None) -> int:
    "A trial of a worker that is gone, with or without a result in its folder; returns its number."
    found.folder.mkdir(parents=True, exist_ok=True)
    with holding(found.folder / "study.lock"):
        trial = propose(found, open_study(found))
        trial.set_user_attr("worker", asdict(Process(this_process().host, 2**22 + 1, 0.0)))
    folder = found.trial_folder(trial.number)
    folder.mkdir()
    if result:
        (folder / "model.zip").write_text("weights")
        write_json(folder / "result.json", result)
    return trial.number


def test_a_finished_trial_whose_worker_died_before_it_wrote_the_line_counts(tmp_path):
    found = study(tmp_path)
    kept = left_behind(found, {"status": "ok", "mean_reward": 5.0, "std_reward": 0.0, "model": "model.zip"})
    lost = left_behind(found, None)
    with (found.folder / RESULTS).open("a") as file:
        file.write('{"trial": 7, "status": "ok", "mean_reward": 1e9, "champ')
    with (found.folder / "journal.jsonl").open("a") as file:
        file.write('{"op_code": 4, "worker')
    with holding(found.folder / "study.lock"):
        settle(found, open_study(found))
    assert [(row["trial"], row["status"]) for row in check_consistent(found)] == [(kept, "ok"), (lost, "abandoned")]
    assert found.best()["mean_reward"] == 5.0


def test_killed_between_the_line_and_the_rest(tmp_path):
    "The line is on disk, but neither the champion nor the journal knows."
    found = study(tmp_path)
    number = left_behind(found, {"status": "ok", "mean_reward": 5.0, "model": "model.zip"})
    model = f"trial-{number:04d}/model.zip"
    row = {"trial": number, "params": {}, "mean_reward": 5.0, "status": "ok", "champion": True, "model_path": model}
    append_line(found.results_file, row)
    with holding(found.folder / "study.lock"):
        settle(found, open_study(found))
    assert len(check_consistent(found)) == 1


@given(st.lists(st.dictionaries(st.text(max_size=3), st.floats() | st.text(max_size=5), max_size=3), max_size=5), st.integers(0, 60))
def test_lines_after_a_cut_anywhere(rows, cut):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        for row in rows:
            append_line(path, row)
        if path.exists():
            path.write_bytes(path.read_bytes()[:cut])
        kept = whole_lines(path)
        assert len(kept) == (path.read_bytes().count(b"\n") if path.exists() else 0)
        append_line(path, {"new": 1})
        assert len(whole_lines(path)) == len(kept) + 1 and whole_lines(path)[-1] == {"new": 1}


# ---- several workers

def test_two_workers_share_a_study(tmp_path):
    workers = [worker(tmp_path, 6) for _ in range(2)]
    assert [w.wait(180) for w in workers] == [0, 0]
    rows = check_consistent(study(tmp_path))
    assert sorted(row["trial"] for row in rows) == list(range(6)) and all(row["status"] == "ok" for row in rows)
    assert len({t.user_attrs["worker"]["pid"] for t in open_study(study(tmp_path)).get_trials(deepcopy=False)}) == 2
    assert len({tuple(row["params"].values()) for row in rows}) == 6


# ---- what goes wrong in a trial

def test_failed_trials_reach_neither_the_process_nor_the_champion(tmp_path):
    found = study(tmp_path, "FAULTY", deadline=15, random_trials=3)
    rows = search(found, 14)
    check_consistent(found)
    expected = ["ok", "not_finite", "failed", "crashed", "deadline", "not_finite", "failed", "not_finite", "no_simulator"]
    assert [row["status"] for row in rows] == expected + ["ok"] * 5
    assert all(row["mean_reward"] is None and row["error"] and not row["champion"] for row in rows if row["status"] != "ok")
    assert [row["sampler"] for row in rows[:11]] == ["random"] * 11, "the process needs three successes, not three trials"
    assert "gp" in {row["sampler"] for row in rows[11:]}
    complete = open_study(found).get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])
    assert {t.number for t in complete} == {row["trial"] for row in rows if row["status"] == "ok"}
    assert not processes_of(tmp_path)
    assert (found.trial_folder(0) / "log.txt").read_text() == "", "a trial that went well has nothing to complain of"


def test_a_corner_that_always_fails_does_not_hold_the_search(tmp_path):
    "The process never hears that the corner fails and would propose it for ever; what lies next to a failure is drawn at random."
    found, journal, ok = study(tmp_path), optuna.create_study(direction="maximize"), []
    for _ in range(14):
        trial = propose(found, journal)
        ok.append(trial.params["x"] > -0.4)
        if ok[-1]:
            journal.tell(trial.number, search_tools.height(trial.params))
        else:
            journal.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    assert sum(ok) >= 6, ok


# ---- does it find anything?

def best_of(found: Study, trials: int) -> float:
    "The best height that a study finds, without processes and files."
    journal, best = optuna.create_study(direction="maximize"), -math.inf
    for _ in range(trials):
        trial = propose(found, journal)
        best = max(best, search_tools.height(trial.params))
        journal.tell(trial.number, search_tools.height(trial.params))
    return best


def test_the_search_beats_random_search(tmp_path):
    "Ten seeds, twelve trials each: what is missing to the top, in the geometric mean, is less than a third of what random search misses."
    space = load_space(search_tools.write_space(tmp_path))
    missing = {}
    for by, random_trials in (("search", 3), ("random", 10**6)):
        missing[by] = np.array([-best_of(Study(space, tmp_path, seed, random_trials), 12) for seed in range(10)])
    ratio = float(np.exp(np.mean(np.log(missing["search"] / missing["random"]))))
    wins = int((missing["search"] < missing["random"]).sum())
    assert ratio < 1 / 3 and wins >= 8, (ratio, wins)


def test_best_and_defaults_are_trained_again_under_fresh_seeds(tmp_path):
    found = study(tmp_path)
    rows = search(found, 3)
    first = confirm(found, 2)
    assert [(r["which"], r["seed"]) for r in first] == [(w, s) for s in (1_000_000, 1_000_001) for w in ("best", "defaults")]
    assert {r["seed"] for r in rows}.isdisjoint(r["seed"] for r in first)
    size = (found.folder / "confirmation.jsonl").stat().st_size
    assert confirm(found, 2) == first == confirmed(found) and (found.folder / "confirmation.jsonl").stat().st_size == size
    assert first[1]["params"] == {"x": 0.0, "rate": 0.1} and first[1]["mean_reward"] == search_tools.height(first[1]["params"])


def test_a_study_is_not_mixed_with_another_space(tmp_path):
    found = study(tmp_path)
    open_study(found)
    other = replace(found.space, parameters=(Parameter("x", -2.0, 2.0),))
    with pytest.raises(LabError, match="another search space"):
        open_study(replace(found, space=other))
    open_study(replace(found, space=replace(found.space, deadline=5.0)))  # more patience is no other search


# ---- pushing

def test_pushes_to_a_remote_that_is_away_for_a_while(project, tmp_path):
    "The command itself, in a repository with other things lying about."
    for line in ("init --quiet --initial-branch main", "config user.name somebody", "config user.email somebody@example.org",
                 "add .", "commit --quiet -m first"):
        git(project.root, *line.split())
    git(tmp_path, "init", "--bare", "--quiet", "bare")
    (project.root / "settings.ini").write_text((project.root / "settings.ini").read_text() + "# a thought\n")
    (project.root / "staged.txt").write_text("half\n")
    git(project.root, "add", "staged.txt")
    (project.root / ".git" / "info" / "exclude").write_text("data/autoresearch/\n")
    before, path = git(project.root, "status", "--porcelain"), os.pathsep.join([str(ROOT), str(HERE)])
    words = ("autoresearch", "toy", "--space", search_tools.write_space(tmp_path), "--push-every", "2", "--no-packet",
             "--min-trials-before-gp", "9")
    git(project.root, "remote", "add", "origin", "git://127.0.0.1:1/nowhere")
    done = project.rlnb(*words, "--trials", "3", PYTHONPATH=path)
    assert done.returncode == 0 and done.stdout.count("[PUSH] not pushed, will be tried again: git push: ") == 2, done.stderr
    assert done.stdout.count("trial ") == 3 and git(project.root, "status", "--porcelain") == before
    git(project.root, "remote", "set-url", "origin", str(tmp_path / "bare"))
    done = project.rlnb(*words, "--trials", "5", PYTHONPATH=path)
    assert done.returncode == 0 and "5 results are on origin, branch main" in done.stdout
    place = "data/autoresearch/toy"
    assert git(tmp_path / "bare", "show", f"main:{place}/{RESULTS}") == (project.root / place / RESULTS).read_text()
    first = git(tmp_path / "bare", "rev-list", "--max-parents=0", "main").strip()
    changed = git(tmp_path / "bare", "diff", "--name-only", first, "main").split()
    assert sorted(changed) == [f"{place}/{RESULTS}", f"{place}/champion/manifest.json"]
    assert git(project.root, "status", "--porcelain") == before


def test_a_push_that_hangs_is_cut_off(tmp_path):
    with pytest.raises(LabError, match="did not end within"):
        git(tmp_path, "-c", "alias.wait=!sleep 30", "wait", seconds=0.5)
    said = []
    assert not Publisher([tmp_path / RESULTS], 1, say=said.append).push(1)
    assert said and "not a git repository" in said[0]


# ---- space files

@pytest.mark.parametrize("old, new, words", [
    ("low = -1.0, high = 1.0", "low = 1.0, high = -1.0", r"toy\.toml, line 7, parameters\.x\.low: bounds are reversed"),
    ("low = 1e-4", "low = 0.0", r"line 8, parameters\.rate\.low: a logarithmic range cannot start at 0\.0"),
    ("low = 1e-4", "low = -1e-4", r"line 8, parameters\.rate\.low: a logarithmic range"),
    ("x = {", "y = {", r"line 7, parameters\.y: unknown parameter.*knows rate, word, x"),
    ("high = 1.0 }", "hihg = 1.0 }", r"line 7, parameters\.x\.hihg: unknown key \(did you mean 'high'"),
    ("low = -1.0", "low = nan", r"line 7, parameters\.x\.low: nan is no finite number"),
    ("low = -1.0", 'low = "a"', r"line 7, parameters\.x\.low: 'a' is no finite number"),
    ("low = -1.0, high = 1.0", 'choices = ["a"]', r"line 7, parameters\.x\.choices: must be a list"),
    ("low = -1.0, high = 1.0", 'choices = ["a", "b"]', r"line 7, parameters\.x: the objective's default is 0\.0: give low and high"),
    ("low = -1.0, high = 1.0", "low = 1, high = 9, step = 0.5", r"line 7, parameters\.x\.step"),
    ("[parameters]", "[parametres]", r"line 6, parametres: unknown section"),
    ("deadline = 60", "deadline = -1", r"line 4, study\.deadline"),
    ("search_tools:HILL", "search_tools:height", r"line 3, study\.objective: .* is a function, not an Objective"),
    ("search_tools:HILL", "no_such_module:HILL", r"line 3, study\.objective: .* cannot be found"),
    ('name = "toy"', 'name = "../toy"', r"line 2, study\.name"),
    ("[study]", "[study", r"toy\.toml: .*line 1"),
])
def test_mistakes_in_a_space_file_name_line_and_key(tmp_path, old, new, words):
    path = search_tools.write_space(tmp_path)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(LabError, match=words):
        load_space(path)


@pytest.mark.parametrize("name", ["car", "tracker"])
def test_the_project_s_own_spaces(name):
    space = load_space(ROOT / "data" / "search" / f"{name}.toml")
    baseline = space.baseline()
    for p in space.parameters:
        assert p.nearest(baseline[p.name]) == baseline[p.name]
        assert 0 <= p.unit(baseline[p.name]) <= max(len(p.choices) - 1, 1)
    assert list(space.distributions()) == list(baseline)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(-1e7, 1e7))
def test_the_nearest_value_is_allowed(a, b, value):
    if a < b:
        parameter = Parameter("x", a, b)
        assert a <= parameter.nearest(value) <= b and (not a <= value <= b or parameter.nearest(value) == value)


# ---- the report

def test_the_packet_says_what_the_fresh_seeds_say(project, tmp_path, monkeypatch):
    from rlnb.cli.autoresearch import report
    from rlnb.lab.runs import Run, records

    stage = ROOT / "nbs" / "stages" / "autoresearch.ipynb"
    (project.root / "nbs" / "stages" / stage.name).write_bytes(stage.read_bytes())
    monkeypatch.chdir(project.root)
    found, draw, best = study(tmp_path), np.random.default_rng(0), -math.inf
    for number in range(8):
        params = {"x": float(draw.uniform(-1, 1)), "rate": float(10 ** draw.uniform(-4, 0))}
        ok = number != 5
        value = search_tools.height(params) if ok else None
        append_line(found.results_file, {
            "trial": number, "params": params, "mean_reward": value, "std_reward": None, "status": "ok" if ok else "deadline",
            "champion": ok and value > best, "model_path": None, "seed": number, "seconds": 1.0,
            "sampler": "random" if number < 3 else "gp", "error": None if ok else "not finished <b>after</b> 60 s", "figures": None})
        best = max(best, value) if ok else best
    champion = found.best()
    for seed in range(3):
        for which, params, value in (("best", champion["params"], 1.0), ("defaults", found.space.baseline(), 2.0)):
            row = {"which": which, "seed": seed, "params": params, "status": "ok", "mean_reward": value + 0.1 * seed, "figures": None}
            append_line(found.folder / "confirmation.jsonl", row)
    report(project.settings(), found, tmp_path / "toy.toml")
    (record,) = records(project.settings())
    told = Run(project.settings().runs / record["id"]).evaluation("search")
    assert f"8 trials: 7 ok, 1 deadline. Best is trial {champion['trial']}" in told["text"]
    assert "these trainings favour the defaults" in told["text"] and "a difference of -1 (" in told["text"]
    assert set(told["next"]) == {"x", "rate"} and told["scores"]["best"] == [1.0, 1.1, 1.2]
    page = next((project.settings().site / "packets").rglob("autoresearch.html")).read_text()
    assert page.count("<figure") >= 5 and "not finished &lt;b&gt;after" in page
