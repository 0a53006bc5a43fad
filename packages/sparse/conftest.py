"""Modules of the numba backend are searched for doctests only where numba is installed."""

from importlib.util import find_spec

_NEED_NUMBA = "bitmap conv_kernels conv_numba conv_plan conv_tile jit rulebook_numba".split()
_PACKAGE = "src/bevquant_sparse"
collect_ignore = [] if find_spec("numba") else [f"{_PACKAGE}/_{name}.py" for name in _NEED_NUMBA]
