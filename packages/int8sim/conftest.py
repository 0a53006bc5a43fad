"""The compiled kernels are searched for doctests only where numba is installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("numba") else ["src/bevquant_int8sim/_compiled"]
