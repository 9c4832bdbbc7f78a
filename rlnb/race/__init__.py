"""The race: courses, contacts, rules and the planners that fly above the tracker."""

import rlnb.tracker  # noqa: F401  first: it sets the flag that crazyflow wants before Brax imports SciPy
