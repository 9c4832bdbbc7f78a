"""The command line: quick, helpful, and honest about errors."""
import re
import shlex
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from rlnb.cli import drift
from rlnb.cli.ladder import code_hash
from rlnb.cli.main import main, parser

COMMANDS = sorted(next(a for a in parser()._actions if a.dest == "command").choices)


def lines(done: subprocess.CompletedProcess) -> list[str]:
    return done.stderr.splitlines()


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_ends_with_an_example(project, command):
    done = project.rlnb(*filter(None, [command]), "--help")
    assert done.returncode == 0
    assert re.match(r"example: rlnb \w+", done.stdout.strip().splitlines()[-1])


def test_the_examples_work_as_typed(project, monkeypatch, capsys):
    "Each example is parsed; those that train nothing are run, in this very project."
    harmless = {"settings", "runs", "gate", "publish", "state"}
    (project.root / "tests" / "data").mkdir(parents=True)
    for name in ("hover_exam.json",):
        (project.root / "tests" / "data" / name).write_bytes((ROOT / "tests" / "data" / name).read_bytes())
    for command in [c for c in COMMANDS if c in harmless | {"stage", "ladder"}]:
        example = project.rlnb(command, "--help").stdout.strip().splitlines()[-1].removeprefix("example: rlnb ")
        parser().parse_args(shlex.split(example))
        if command in harmless:
            done = project.rlnb(*shlex.split(example))
            assert done.returncode == 0, (example, done.stderr)
    assert (project.root / "reports" / "site" / "index.html").exists()


@pytest.mark.parametrize("words", [["--help"], ["settings"], ["ladder", "--help"], ["runs"],
                                   ["gate", "--stage", "hover", "--metrics-json", str(ROOT / "tests" / "data" / "hover_exam.json")]])
def test_quick_commands_import_nothing_heavy(project, words):
    code = (f"import sys\nfrom rlnb.cli.main import main\ntry:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
            "heavy = {'jax', 'numpy', 'pandas', 'papermill', 'nbconvert', 'nbformat', 'matplotlib', 'wandb', 'torch'} & set(sys.modules)\n"
            "assert not heavy, heavy")
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=project.root, env=project.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("words, expected", [
    ([], "command"), (["laddr"], "did you mean 'ladder'"), (["stage"], "stage"), (["gate"], "--stage"),
    (["ladder", "--util", "hover"], "did you mean '--until'"), (["stage", "hover", "--timesteps", "many"], "no whole number"),
    (["stage", "hover", "--timesteps", "0"], "no whole number"), (["state", "rebild"], "did you mean 'rebuild'"),
    (["runs", "no-such-run"], "no such run"), (["settings", "extra"], "extra"),
    (["gate", "--stage", "hover", "--metrics-json", "nowhere.json"], "no such file")])
def test_bad_input_is_one_line_and_exit_code_1(project, words, expected):
    done = project.rlnb(*words)
    assert done.returncode == 1 and not done.stdout
    assert len(lines(done)) == 1 and lines(done)[0].startswith("rlnb: error: ") and expected in lines(done)[0], done.stderr


def test_outside_of_any_project(tmp_path, project):
    command = [sys.executable, "-m", "rlnb.cli", "settings"]
    done = subprocess.run(command, cwd=tmp_path, env=project.environment(), capture_output=True, text=True)
    assert done.returncode == 1 and "no settings.ini" in done.stderr and len(lines(done)) == 1


def test_a_defect_is_one_line_too_and_keeps_its_traceback(project, monkeypatch, capsys):
    monkeypatch.chdir(project.root)

    def defect(options):
        raise ZeroDivisionError("one\ntwo")
    monkeypatch.setattr("rlnb.cli.main.show_settings", defect)
    assert main(["settings"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "ZeroDivisionError: one two" in error and "data/rlnb-traceback.log" in error
    assert "def defect" not in error and "ZeroDivisionError" in (project.root / "data" / "rlnb-traceback.log").read_text()


def test_a_reader_that_goes_away_is_no_error(project):
    done = subprocess.run(f"{shlex.quote(sys.executable)} -m rlnb.cli settings | head -1", shell=True, cwd=project.root,
                          env=project.environment(), capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and done.stdout.startswith("setting")


def test_the_fingerprint_of_code_ignores_what_does_nothing(tmp_path):
    def hash_of(name, text):
        (tmp_path / name).write_text(text)
        return code_hash(tmp_path / name)
    first = hash_of("a.py", "def f(x):\n    'doc'\n    return x + 1\n")
    assert first == hash_of("b.py", "# a remark\ndef f(x):\n    'another doc'\n\n    return (x + 1)\n")
    assert first != hash_of("c.py", "def f(x):\n    return x + 2\n")
    assert hash_of("d.py", "%matplotlib inline") != hash_of("e.py", "%matplotlib widget"), "what is no Python counts as text"


@pytest.fixture
def tree(tmp_path):
    "A small nbdev project that agrees with itself."
    import nbformat

    for folder in ("nbs", "rlnb"):
        (tmp_path / folder).mkdir()
    (tmp_path / "settings.ini").write_text("")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "rlnb"\nversion = "0"\n[tool.nbdev]\nlib_path = "rlnb"\nnbs_path = "nbs"\n')
    (tmp_path / "rlnb" / "__init__.py").write_text('__version__ = "0"\n')
    code, prose, book = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell, nbformat.v4.new_notebook
    one = book(cells=[code("#| default_exp one"), code("#| export\ndef f():\n    return 1")])
    nbformat.write(one, tmp_path / "nbs" / "one.ipynb")
    nbformat.write(book(cells=[prose("# Title\n\n[one](one.ipynb)")]), tmp_path / "nbs" / "index.ipynb")
    subprocess.run([sys.executable, "-c", "import nbdev; nbdev.nbdev_export()"], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "README.md").write_text(drift.readme(tmp_path))
    return tmp_path


def check(tree, monkeypatch, capsys) -> tuple[int, str]:
    monkeypatch.chdir(tree)
    monkeypatch.setattr(sys, "argv", ["drift"])
    code = drift.main()
    return code, capsys.readouterr().out


def test_drift_is_found_wherever_it_is(tree, monkeypatch, capsys):
    assert check(tree, monkeypatch, capsys)[0] == 0
    assert "](nbs/one.ipynb)" in (tree / "README.md").read_text()
    module = tree / "rlnb" / "one.py"
    text = module.read_text()
    module.write_text(text.replace("return 1", "return 2"))
    code, out = check(tree, monkeypatch, capsys)
    assert code == 1 and "rlnb/one.py: differs from its notebook" in out
    assert module.read_text() != text, "nothing is changed by looking"
    module.write_text(text)
    (tree / "rlnb" / "two.py").write_text(text.replace("one", "two"))
    assert "rlnb/two.py: no notebook makes it" in check(tree, monkeypatch, capsys)[1]
    (tree / "rlnb" / "two.py").unlink()
    (tree / "README.md").write_text("# Title\n")
    assert "README.md: differs" in check(tree, monkeypatch, capsys)[1]
