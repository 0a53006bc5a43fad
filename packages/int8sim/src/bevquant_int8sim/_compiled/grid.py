"""Convolutions over pixels that all see every offset, through the compiled kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bevquant_int8sim._compiled.launch import Call, kernel_calls
from bevquant_int8sim._compiled.packed import PackedWeight
from bevquant_int8sim._compiled.parameters import P
from bevquant_int8sim._compiled.sparse import first_sums
from bevquant_int8sim._tile_output import Requantization


@dataclass(frozen=True, eq=False)
class GridPlan:
    """Which pixels of an input meet which outputs."""

    tile_rows: int
    # int32 ``[tiles · tile_rows]``: the input pixel at the distance 0 from output o.
    in_rows: npt.NDArray[np.int32]
    # Int32, as `in_rows`: row of the output, −1 behind the last.
    out_rows: npt.NDArray[np.int32]
    # int64 ``[volume]``: pixels from there to the one that each offset sees.
    deltas: npt.NDArray[np.int64]


def make_plan(
    in_rows: npt.NDArray[Any], out_rows: npt.NDArray[Any], deltas: npt.NDArray[Any], tile_rows: int
) -> GridPlan:
    """Fill the lists of outputs to whole tiles; what is added is computed and stored nowhere."""
    missing = -len(in_rows) % tile_rows
    last = in_rows[-1:].repeat(missing)
    return GridPlan(
        tile_rows,
        np.concatenate([in_rows, last]).astype(np.int32),
        np.concatenate([out_rows, np.full(missing, -1)]).astype(np.int32),
        np.asarray(deltas, np.int64),
    )


def grid_calls(
    pixels: npt.NDArray[Any],
    packed: PackedWeight,
    bias: npt.NDArray[np.int32] | None,
    plan: GridPlan,
    out: npt.NDArray[Any],
    output: Requantization | None = None,
) -> list[Call]:
    """The kernel calls that convolve readable `pixels` into `out`, as `sparse_calls` does.

    Every output sees every offset, so that inputs with 128 added cost one constant a channel.
    """
    init = first_sums(packed, bias)
    for group in packed.groups:
        if group.offset_init is not None:
            columns = slice(group.first, group.first + group.offset_init.shape[1])
            init[columns] += group.offset_init.sum(0, dtype=np.int32)
    joins = packed.kind != "amx" and _without_gaps(pixels, packed)
    joined = _side_by_side(plan.deltas) if joins else 1
    tables: dict[P, npt.NDArray[Any]] = {
        P.ROWS: plan.in_rows,
        P.OUT_ROWS: plan.out_rows,
        P.DELTAS: plan.deltas[::joined] * pixels.strides[0],
    }
    outputs = len(plan.in_rows)
    tiles, seen = outputs // plan.tile_rows, outputs * packed.volume
    calls = kernel_calls("grid", tables, tiles, seen, pixels, packed, init, out, output)
    for call in calls:
        call.parameters[P.VOLUME] = packed.volume // joined
        call.parameters[P.STEPS] = packed.steps * joined
    return calls


def _without_gaps(pixels: npt.NDArray[Any], packed: PackedWeight) -> bool:
    """Whether the channels of neighbouring pixels follow each other as the weights do."""
    return pixels.strides[0] == packed.padded_inputs * pixels.itemsize


def _side_by_side(deltas: npt.NDArray[np.int64]) -> int:
    """How many offsets in a row see pixels in a row: they are one offset with more channels."""
    breaks = np.flatnonzero(np.diff(deltas) != 1)
    count = int(breaks[0]) + 1 if len(breaks) else len(deltas)
    if not count or len(deltas) % count:
        return 1
    lines = deltas.reshape(-1, count)
    return count if (lines == lines[:, :1] + np.arange(count)).all() else 1
