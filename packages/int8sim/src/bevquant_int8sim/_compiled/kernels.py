"""The compiled kernels: which tile for how many output channels, each made when first needed."""

from __future__ import annotations

import functools
from typing import Any

from bevquant_int8sim._compiled import amx_loops
from bevquant_int8sim._compiled.dot_product import is_wide
from bevquant_int8sim._compiled.jit import compile_loop
from bevquant_int8sim._compiled.tile_loops import grid_loop, sparse_loop

_LOOPS = {"sparse": sparse_loop, "grid": grid_loop}
_AMX_LOOPS = {"sparse": amx_loops.sparse_loop, "grid": amx_loops.grid_loop}


def column_groups(vectors: int) -> list[tuple[int, int]]:
    """(first vector, number of vectors) of each group of output channels that a tile holds."""
    # Groups of one layer have the same number of rows, so that they share one plan.
    widest = 1 if not is_wide() else 4 if vectors % 4 == 0 else 3
    return [(start, min(widest, vectors - start)) for start in range(0, vectors, widest)]


def tile_rows(vectors: int) -> int:
    """Rows of the tiles of a layer with that many vectors of 16 output channels."""
    # A vector is two of 16 registers: 6 accumulators.
    if not is_wide():
        return 6
    # AVX-512 has 32 registers: 24 accumulators, up to 4 vectors of weights, a broadcast input and a
    # product.
    return 6 if vectors % 4 == 0 else 8


@functools.cache
def kernel(kind: str, job: str, rows: int, vectors: int) -> Any:
    """The C function ``void(first tile, last tile + 1, address of the parameters)``.

    `kind` is ``"amx"``, ``"vnni"``, ``"portable"`` or ``"portable16"``, `job` ``"sparse"`` or
    ``"grid"``; AMX has one kernel for any number of vectors.
    """
    if kind == "amx":
        return compile_loop(f"{job}_amx", _AMX_LOOPS[job]())
    return compile_loop(f"{job}_{kind}_{rows}x{vectors}", _LOOPS[job](kind, rows, vectors))
