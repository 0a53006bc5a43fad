"""Modules of the compiled backends are searched for doctests only where numba is installed."""

from importlib.util import find_spec

_NEED_NUMBA = (
    "dense_numba dot_product epilogue grid_numba ir jit kernels launch packed pillar_tiles pillars "
    "planned_rulebook scatter self_test sparse_numba sparse_plan spin threads tile_loops"
).split()
_PACKAGE = "src/bevquant_int8sim"
_FILES = [*(f"_{name}" for name in _NEED_NUMBA), "model/_rowwise_numba"]
collect_ignore = [] if find_spec("numba") else [f"{_PACKAGE}/{name}.py" for name in _FILES]
