"""Compile a generated kernel with numba, cached on disk under a name that covers its generator."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
from numba import cfunc

_GENERATORS = (
    "amx_loops", "dot_product", "epilogue", "ir", "jit", "kernels", "parameters",
    "tile_instructions", "tile_loops",
)  # fmt: skip
_SIGNATURE = "void(int64, int64, int64)"


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
    """Compile the intrinsic `body(first, stop, address of parameters)` to a C function."""
    # A global of the compiled function, not a cell of a closure: numba hashes cells into the
    # cache's key, and an intrinsic's hash differs in every process.
    function = FunctionType(_template.__code__, {"body": body, "__name__": __name__}, name)
    # The file's name carries the generator's digest; numba adds the CPU's name and features.
    function.__qualname__ = f"{name}_{_version()}"
    try:
        return cfunc(_SIGNATURE, cache=True)(function)
    except Exception:  # as in `compiled`
        return cfunc(_SIGNATURE)(function)
