"""numba where it is installed, its on-disk cache where that can be written."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["has_numba", "jit"]


@cache
def has_numba() -> bool:
    """Say whether numba can be imported, without importing it."""
    return importlib.util.find_spec("numba") is not None


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel that runs without the GIL.

    The kernels are serial on purpose: numba's own thread pools do not survive a fork and one of
    them aborts when two Python threads enter it, so the callers split the work themselves.
    `error_model="numpy"` gives IEEE division without a check per element.
    """
    import numba

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(**options)(function)  # type: ignore[no-any-return]
