"""Dense convolutions through the compiled kernels: pixels of a padded grid, offsets by distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bevquant_int8sim._launch import launch
from bevquant_int8sim._packed import PackedWeight
from bevquant_int8sim._parameters import P
from bevquant_int8sim._tile_output import Requantization

__all__ = ["GridPlan", "make_plan", "run_grid"]


@dataclass(frozen=True, eq=False)
class GridPlan:
    """Which pixels of a padded input meet which outputs.

    Attributes:
        tile_rows: Outputs of a tile.
        in_rows: int32 ``[tiles · tile_rows]``: the input pixel that output o sees under offset 0.
        out_rows: int32, as `in_rows`: row of the output, −1 behind the last.
        deltas: int64 ``[volume]``: pixels from the one of offset 0 to that of each offset.
    """

    tile_rows: int
    in_rows: npt.NDArray[np.int32]
    out_rows: npt.NDArray[np.int32]
    deltas: npt.NDArray[np.int64]


def make_plan(
    in_rows: npt.NDArray[Any],
    out_rows: npt.NDArray[Any],
    deltas: npt.NDArray[Any],
    tile_rows: int,
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


def run_grid(
    pixels: npt.NDArray[Any],
    packed: PackedWeight,
    bias: npt.NDArray[np.int32] | None,
    plan: GridPlan,
    out: npt.NDArray[Any],
    output: Requantization | None = None,
    flip: int = 0,
) -> None:
    """Convolve prepared `pixels` ``[pixels, channels]`` into `out`, as the sparse kernel does.

    Inputs with 128 added have 128 in the padding's pixels as well: every output sees every offset,
    so that what the addition costs is one constant a channel.
    """
    init = np.zeros(packed.padded_outputs, np.int32)
    if bias is not None:
        init[: packed.out_channels] = bias
    for group in packed.groups:
        if group.offset_init is not None:
            columns = slice(group.first, group.first + group.offset_init.shape[1])
            init[columns] += group.offset_init.sum(0, dtype=np.int32)
    deltas = plan.deltas * pixels.strides[0]
    tables = {
        P.ROWS: plan.in_rows.ctypes.data,
        P.OUT_ROWS: plan.out_rows.ctypes.data,
        P.DELTAS: deltas.ctypes.data,
        P.VOLUME: packed.volume,
    }
    outputs = len(plan.in_rows)
    products = outputs * packed.volume * packed.padded_inputs * packed.padded_outputs
    tiles = outputs // plan.tile_rows
    launch("grid", tables, tiles, products, pixels, packed, init, out, output, flip)
