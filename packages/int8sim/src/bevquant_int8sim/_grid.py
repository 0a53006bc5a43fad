"""A dense convolution as lists of pixels: which ones each output sees, and which see all."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bevquant_int8sim._grid_axes import Axis


@dataclass(frozen=True, eq=False)
class Grid:
    """Pixel numbers of one phase of a convolution over a batch.

    Attributes:
        in_rows: int64 ``[outputs]``: the pixel at the distance 0, which may lie outside.
        out_rows: int64 ``[outputs]``: the pixel of the output.
        whole: bool ``[outputs]``: every kernel element sees a pixel, as many as asked for follow.
        deltas: int64 ``[offsets]``: distance to the pixel that each kernel element sees.
        neighbours: int32 ``[outputs that are not whole, offsets]``: the pixels seen, −1 for none.
        taps: int64 ``[offsets]``: number of the kernel element, row-major over its axes.
    """

    in_rows: npt.NDArray[np.int64]
    out_rows: npt.NDArray[np.int64]
    whole: npt.NDArray[np.bool_]
    deltas: npt.NDArray[np.int64]
    neighbours: npt.NDArray[np.int32]
    taps: npt.NDArray[np.int64]


@functools.lru_cache(maxsize=64)
def make_grid(batch: int, axes: tuple[Axis, ...], kernel: tuple[int, ...], behind: int = 0) -> Grid:
    """The pixels of the outputs that `axes` describe.

    An output is `whole` if in memory so many pixels lie `behind` the last that it sees.
    """
    in_rows = out_rows = np.arange(batch, dtype=np.int64)
    deltas = taps = np.zeros(1, np.int64)
    inside: npt.NDArray[np.bool_] = np.ones((batch, 1), np.bool_)  # [outputs, offsets], by axis
    for axis, size in zip(axes, kernel, strict=True):
        j = np.arange(axis.count)
        starts = axis.start + j * axis.step
        outs = axis.first_out + j * axis.out_step
        steps = np.array(axis.deltas, np.int64)
        seen = starts[:, None] + steps
        fits = (seen >= 0) & (seen < axis.size)
        in_rows = (in_rows[:, None] * axis.size + starts).reshape(-1)
        out_rows = (out_rows[:, None] * axis.out_size + outs).reshape(-1)
        deltas = (deltas[:, None] * axis.size + steps).reshape(-1)
        taps = (taps[:, None] * size + np.array(axis.taps, np.int64)).reshape(-1)
        joined = inside[:, None, :, None] & fits[None, :, None, :]
        inside = joined.reshape(len(in_rows), len(deltas))
    whole = np.asarray(inside.all(1))
    if behind and len(deltas):
        pixels = batch * math.prod(axis.size for axis in axes)
        whole &= in_rows + deltas.max() + behind < pixels
    partly = in_rows[~whole, None] + deltas
    neighbours = np.where(inside[~whole], partly, -1).astype(np.int32)
    return Grid(in_rows, out_rows, whole, deltas, neighbours, taps)
