"""Compile with numba ahead of the first call, cached on disk where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import config, njit

if config.DISABLE_JIT:
    # Generated code cannot run as Python; callers take the torch path on an ImportError.
    raise ImportError("NUMBA_DISABLE_JIT is set")


def compiled(signature: str, *, any_order: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: compile for ``signature`` at once, without the GIL, cached where possible.

    numba's cache sees changes of the function's own file only: code that is generated for it lies
    there too.

    Write inner loops as ``part = x[first:stop]`` and ``for i in range(len(part))``. An index that
    numba does not know to be 0 or more is taken from the end where it is negative, which costs a
    choice for each value and makes a gather of each vector's load: a quarter of the speed.

    Args:
        signature: numba's.
        any_order: Sums of floats may be added up in any order, several values at a time: their last
            bits are then those of this CPU's vectors.
    """
    options = {"nogil": True, "fastmath": {"reassoc"} if any_order else False}

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(signature, cache=True, **options)(function)
        except Exception:  # no writable place for a cache, or a damaged one: unpickling raises any
            return njit(signature, **options)(function)

    return decorate
