"""The car wing's source notebooks run. They stand aside from `nbdev-test nbs` (nbs/car/.notest), since they need the extra `car`."""
import os
import subprocess
import sys
from pathlib import Path

import car_tools

car_tools.need_car_extra()
FOLDER = Path(__file__).resolve().parent.parent / "nbs" / "car"


def test_notebooks_run():
    command = [Path(sys.executable).parent / "nbdev-test", FOLDER, "--n-workers", "2", "--ignore-fname", ".never"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert len(list(FOLDER.glob("[0-9]*.ipynb"))) >= 16
