"""numba where it is installed, its on-disk cache where that can be written."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

from bevquant_quantizers.plugins import importable

SMALLEST_PART = 1 << 16  # values; fewer cost less than handing them to a thread


@cache
def has_numba() -> bool:
    """Say whether numba can be imported and compiles, without importing it."""
    return importable("numba") and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"


def use_numba(backend: str, worthwhile: bool) -> bool:
    """Decide for numba: where it is asked for, or for "auto" where installed and worthwhile."""
    if backend not in ("auto", "numba", "torch"):
        raise ValueError(f"backend must be 'auto', 'numba' or 'torch', got {backend!r}")
    if backend == "numba" and not has_numba():
        raise ImportError(
            "backend='numba' needs numba, without NUMBA_DISABLE_JIT: pip install numba, or use "
            "'auto'"
        )
    return backend == "numba" or (backend == "auto" and worthwhile and has_numba())


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel that runs without the GIL."""
    import numba

    # Serial on purpose: numba's own thread pools do not survive a fork, and one of them aborts when
    # two Python threads enter it; callers split the work. numpy's error model gives IEEE division
    # without a check per element.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(**options)(function)
