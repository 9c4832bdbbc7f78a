"""The car wing's source notebooks run. They stand aside from `nbdev-test nbs` (nbs/car/.notest), since they need the extra `car`."""
import subprocess
import sys
from pathlib import Path

import car_tools
import pytest

car_tools.need_car_extra()
NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "nbs" / "car").glob("[0-9]*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook):
    done = subprocess.run(
        [Path(sys.executable).parent / "nbdev-test", notebook, "--n-workers", "0", "--ignore-fname", ".never"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
