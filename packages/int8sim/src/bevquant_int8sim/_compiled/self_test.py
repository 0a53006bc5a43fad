"""Every kernel against int64, on operands at which wrong arithmetic shows: all of it saturating.

Instructions that add products in 16 bits (``vpmaddubsw``, and with it ``torch._int_mm`` on CPUs
without VNNI) give other sums here.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from bevquant_int8sim._compiled.grid import grid_calls, make_plan
from bevquant_int8sim._compiled.launch import run_calls
from bevquant_int8sim._compiled.packed import pack_weight
from bevquant_int8sim._compiled.sparse import convolve, readable_rows
from bevquant_int8sim._compiled.sparse_plan import SparsePlan
from bevquant_int8sim._saturating import saturating_operands

_ROWS, _VOLUME = 20, 2
_SHAPES = tuple((24, outputs) for outputs in (16, 32, 48, 64))  # one of each width of tile
_AMX_SHAPES = (16, 32), (32, 64), (64, 32), (128, 64)  # each step, one and several, pairs likewise


@functools.cache
def kernels_are_exact(kind: str) -> bool:
    """Whether every kernel of `kind` computes what int64 does."""
    shapes = _AMX_SHAPES if kind == "amx" else _SHAPES
    return all(_sparse_is_exact(kind, *s) and _grid_is_exact(kind, *s) for s in shapes)


def _operands(channels: int, outputs: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    x, w = saturating_operands(_ROWS, _VOLUME * channels, outputs)
    return x.reshape(_ROWS * _VOLUME, channels), w.reshape(_VOLUME, channels, outputs)


def _expected(
    x: npt.NDArray[np.int8], w: npt.NDArray[np.int8], rows: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """Sums over (offset, channel), the offsets' input rows being ``rows[:, offset]``."""
    chosen = x.astype(np.int64)[rows].reshape(len(rows), -1)
    return chosen @ w.astype(np.int64).reshape(-1, w.shape[2])


def _sparse_is_exact(kind: str, channels: int, outputs: int) -> bool:
    x, w = _operands(channels, outputs)
    packed = pack_weight(w, kind)
    tiles = -(-_ROWS // packed.rows)
    pairs = np.arange(_ROWS * _VOLUME, dtype=np.int32).reshape(_ROWS, _VOLUME)
    lines = np.full((tiles * packed.rows, _VOLUME), -1, np.int32)
    lines[:_ROWS] = pairs
    by_entry = np.ascontiguousarray(
        lines.reshape(tiles, packed.rows, _VOLUME).transpose(0, 2, 1).reshape(-1, packed.rows)
    )
    out_rows = np.full(tiles * packed.rows, -1, np.int32)
    out_rows[:_ROWS] = np.arange(_ROWS)
    plan = SparsePlan(
        packed.rows,
        tiles,
        np.arange(tiles + 1, dtype=np.int32) * _VOLUME,
        np.tile(np.arange(_VOLUME, dtype=np.int32), tiles),
        by_entry,
        out_rows,
    )
    out = np.empty((_ROWS, outputs), np.int32)
    convolve(x, packed, None, plan, out)
    return bool((out == _expected(x, w, pairs)).all())


def _grid_is_exact(kind: str, channels: int, outputs: int) -> bool:
    x, w = _operands(channels, outputs)
    packed = pack_weight(w, kind)
    pairs = np.arange(_ROWS * _VOLUME, dtype=np.int32).reshape(_ROWS, _VOLUME)
    plan = make_plan(pairs[:, 0], np.arange(_ROWS), np.arange(_VOLUME), packed.rows)
    out = np.empty((_ROWS, outputs), np.int32)
    run_calls(grid_calls(readable_rows(x, packed), packed, None, plan, out))
    return bool((out == _expected(x, w, pairs)).all())
