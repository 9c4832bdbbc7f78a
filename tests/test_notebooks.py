"""What a notebook may be told, and what stage notebooks must look like."""
import ast
import sys

import nbformat
import numpy as np
import pytest
from conftest import ROOT, notebook
from hypothesis import given
from hypothesis import strategies as st

from rlnb.lab.errors import LabError
from rlnb.lab.notebooks import checked, execute, fits, parameters_of
from rlnb.lab.runs import Run

TYPES = (int, float, str, bool, list[int], str | None, dict[str, float])
ANNOTATIONS = {getattr(t, "__name__", "") if isinstance(t, type) and not hasattr(t, "__args__") else str(t): t for t in TYPES}
values = {
    "int": st.integers(-10**6, 10**6), "float": st.floats(-10**6, 10**6), "bool": st.booleans(),
    "str": st.sampled_from(["", "a'b", '"', "\\n", "é\n"]),
    "list[int]": st.lists(st.integers(-9, 9), max_size=3), "str | None": st.sampled_from(["x", None]),
    "dict[str, float]": st.dictionaries(st.sampled_from("ab"), st.floats(-1, 1), max_size=2)}


def declared(annotation: str, default: str):
    cell = nbformat.v4.new_code_cell(f"x: {annotation} = {default}  # a parameter")
    cell.metadata["tags"] = ["parameters"]
    return nbformat.v4.new_notebook(cells=[cell])


@given(st.sampled_from(sorted(values)).flatmap(lambda name: st.tuples(st.just(name), values[name])))
def test_values_fit_their_own_annotation(pair):
    name, value = pair
    assert fits(value, ANNOTATIONS[name])
    assert checked(declared(name, "None"), {"x": value}) == {"x": value}


@pytest.mark.parametrize("annotation, value", [
    ("int", 1.0), ("int", True), ("int", "1"), ("int", None), ("float", "1.0"), ("float", False), ("bool", 1), ("str", 1), ("str", None),
    ("list[int]", [1, "2"]), ("list[int]", 3), ("str | None", 3), ("dict[str, float]", {"a": "b"}), ("list", "abc")])
def test_values_that_do_not_fit(annotation, value):
    with pytest.raises(LabError, match="not of type"):
        checked(declared(annotation, "None"), {"x": value}, "n.ipynb")


def test_what_people_pass_in_practice(tmp_path):
    assert checked(declared("int", "1"), {"x": np.int32(3)}) == {"x": 3}
    assert checked(declared("float", "1"), {"x": np.float32(0.5)}) == {"x": 0.5}
    assert checked(declared("bool", "True"), {"x": np.bool_(False)}) == {"x": False}
    assert checked(declared("list[int]", "[]"), {"x": np.arange(3)}) == {"x": [0, 1, 2]}
    assert checked(declared("str", "''"), {"x": tmp_path}) == {"x": str(tmp_path)}
    assert checked(declared("Path", "''"), {"x": tmp_path}) == {"x": str(tmp_path)}


@pytest.mark.parametrize("source, words", [
    ("x = 3", "must read 'name: type = value"), ("x: int", "must read"), ("x: int = 2 + y", "is computed"), ("import os", "must read"),
    ("x: int = 1\nprint(x)", "must read")])
def test_what_a_parameters_cell_may_not_hold(source, words):
    cell = nbformat.v4.new_code_cell(source)
    cell.metadata["tags"] = ["parameters"]
    with pytest.raises(LabError, match=words):
        parameters_of(nbformat.v4.new_notebook(cells=[cell]), "n.ipynb")


@pytest.mark.parametrize("annotation", ["__import__('os').getcwd()", "Quadrotor", "int()"])
def test_annotations_are_types_and_nothing_else(annotation):
    with pytest.raises(LabError, match="has the annotation"):
        checked(declared(annotation, "1"), {"x": 1})


STAGES = sorted((ROOT / "nbs" / "stages").glob("*.ipynb"))


@pytest.mark.parametrize("path", STAGES, ids=lambda p: p.stem)
def test_stage_notebooks_have_one_tidy_parameters_cell(path):
    content = nbformat.read(path, as_version=4)
    tagged = [c for c in content.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    for parameter in parameters_of(content, path.name).values():
        assert parameter.comment, f"{parameter.name} has no comment"
    first = next(c for c in content.cells if c.cell_type == "markdown")
    assert first.source.startswith("# ") and len(first.source.split()) >= 20, "it says what it is for"
    for cell in content.cells:
        if cell.cell_type == "code" and not cell.source.startswith("%"):
            ast.parse(cell.source)


@pytest.mark.parametrize("path", sorted((ROOT / "nbs").glob("*/[0-9]*.ipynb")), ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_source_notebooks_are_prose_for_people(path):
    "A title with a summary, short exported cells, imports in cells of their own, stored results, and no prose-free notebook."
    content = nbformat.read(path, as_version=4)
    first = content.cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ") and "\n> " in first.source
    code = [c for c in content.cells if c.cell_type == "code"]
    exported = [c for c in code if c.source.startswith("#| export")]
    assert exported and max(len(c.source.splitlines()) for c in exported) <= 62
    assert sum(len(c.source.split()) for c in content.cells if c.cell_type == "markdown") >= 100
    assert any(c.outputs for c in code), "lessons show results"
    assert any("assert" in c.source for c in code if c not in exported), "lessons check what they claim"
    for cell in exported:
        kinds = {isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(cell.source).body}
        assert len(kinds) == 1, f"imports and code share a cell: {cell.source[:80]}"


def test_a_notebook_that_is_none(project):
    run = Run.create(project.settings(), "hover", {}, 1)
    path = project.root / "broken.ipynb"
    path.write_text("{")
    with pytest.raises(LabError, match=r"broken\.ipynb cannot be read"):
        execute(path, project.root / "out.ipynb", {}, run=run, settings=project.settings())
    assert run.record["status"] == "failed" and "broken.ipynb" in run.record["error"]


def test_the_kernel_is_this_python_whatever_is_installed(project, monkeypatch):
    "A kernel named python3 that belongs to nobody stands first in the search path, and is not taken."
    evil = project.root / "jupyter" / "kernels" / "python3"
    evil.mkdir(parents=True)
    (evil / "kernel.json").write_text('{"argv": ["/bin/false"], "display_name": "Evil", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(project.root / "jupyter"))
    source = ("import json, sys\nfrom pathlib import Path\n"
              "Path(run_dir, 'evaluations', 'python.json').write_text(json.dumps(sys.executable))")
    path = notebook(project.root / "n.ipynb", ["run_dir: str = ''  # run folder", source])
    run = Run.create(project.settings(), "hover", {}, 1)
    execute(path, project.root / "out.ipynb", {"run_dir": run.folder}, run=run, settings=project.settings())
    assert run.evaluation("python") == sys.executable
    run.finish("passed")
