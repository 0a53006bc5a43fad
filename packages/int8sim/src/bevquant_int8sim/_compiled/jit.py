"""Compile a generated kernel with numba, cached on disk under a name that covers its generator."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
from numba import cfunc, config, njit

if config.DISABLE_JIT:
    # Generated code cannot run as Python; callers take the torch path on an ImportError.
    raise ImportError("NUMBA_DISABLE_JIT is set")

_GENERATORS = (
    "amx_loops", "dot_product", "epilogue", "ir", "jit", "kernels", "parameters",
    "tile_instructions", "tile_loops",
)  # fmt: skip
_SIGNATURE = "void(int64, int64, int64)"


def compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: compile for `signature` at once, without the GIL, cached where possible.

    A cache folder that cannot be written, is full, or holds damaged files costs the time of
    compiling, nothing else.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except Exception:  # unpickling what is damaged may raise anything
            return njit(signature, nogil=True)(function)

    return decorate


@functools.cache
def _version() -> str:
    """Digest of what generates the code, which numba's cache does not look at."""
    digest = hashlib.sha256(llvmlite.__version__.encode())
    for name in _GENERATORS:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def _template(first, stop, parameters):
    body(first, stop, parameters)  # type: ignore[name-defined]  # noqa: F821


def compile_loop(name: str, body: Any) -> Any:
    """Compile the intrinsic `body(first, stop, address of parameters)` to a C function.

    `body` is a global of the compiled function, not a cell of a closure: numba hashes cells into
    the cache's key, and an intrinsic's hash differs in every process. The file's name carries the
    generator's digest instead; numba adds the CPU's name and features.
    """
    function = FunctionType(_template.__code__, {"body": body, "__name__": __name__}, name)
    function.__qualname__ = f"{name}_{_version()}"
    try:
        return cfunc(_SIGNATURE, cache=True)(function)
    except Exception:  # as in `compiled`
        return cfunc(_SIGNATURE)(function)
