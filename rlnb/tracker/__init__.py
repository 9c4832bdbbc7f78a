"""The drone reference tracker: physics, commands, rewards, learning and exams."""

import contextlib
import io
import os

# crazyflow refuses to work if SciPy was imported without this flag, and Brax imports SciPy.
os.environ.setdefault("SCIPY_ARRAY_API", "1")
# XLA complains at length, and without cause, each time it loads a program from its own cache.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# Brax brings MuJoCo's MJX, which prints that an optional package is missing; nobody who flies needs to read that.
with contextlib.redirect_stdout(io.StringIO()):
    import mujoco.mjx  # noqa: F401
