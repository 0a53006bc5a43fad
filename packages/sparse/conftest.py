"""Modules of the numba backend are searched for doctests only where numba is installed."""

from importlib.util import find_spec

_PACKAGE = "src/bevquant_sparse"
_NEED_NUMBA = (
    "_bitmap", "_conv_kernels", "_conv_numba", "_pillar_tiles", "_pillars", "_rulebook_numba",
    "_rulebook_pillars", "runtime/jit", "runtime/task_board", "runtime/threads", "tiles",
)  # fmt: skip
collect_ignore = [] if find_spec("numba") else [f"{_PACKAGE}/{name}.py" for name in _NEED_NUMBA]
