"""A dense convolution as the kernels and the torch path see it: rows of pixels and distances."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevquant_int8sim._grid_axes import Axis

__all__ = ["Grid", "Halo", "common_halo", "make_grid", "pad_channels_last"]

Halo = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Grid:
    """Pixel numbers of one phase of a convolution over a batch.

    Attributes:
        in_rows: int64 ``[outputs]``: the pixel of the padded input at the distance 0.
        out_rows: int64 ``[outputs]``: the pixel of the output.
        deltas: int64 ``[offsets]``: distance to the pixel that each kernel element sees.
        taps: int64 ``[offsets]``: number of that element, row-major over the kernel's axes.
    """

    in_rows: npt.NDArray[np.int64]
    out_rows: npt.NDArray[np.int64]
    deltas: npt.NDArray[np.int64]
    taps: npt.NDArray[np.int64]


@functools.lru_cache(maxsize=64)
def make_grid(batch: int, axes: tuple[Axis, ...], kernel: tuple[int, ...], halo: Halo) -> Grid:
    """The pixels of outputs that `axes` describe, in a batch of inputs padded by `halo`."""
    padded = [axis.size + sum(sides) for axis, sides in zip(axes, halo, strict=True)]
    in_rows = out_rows = np.arange(batch, dtype=np.int64)
    deltas = taps = np.zeros(1, np.int64)
    for axis, width, sides, size in zip(axes, padded, halo, kernel, strict=True):
        j = np.arange(axis.count)
        starts = axis.start + j * axis.step + sides[0]
        outs = axis.first_out + j * axis.out_step
        in_rows = (in_rows[:, None] * width + starts).reshape(-1)
        out_rows = (out_rows[:, None] * axis.out_size + outs).reshape(-1)
        deltas = (deltas[:, None] * width + np.array(axis.deltas, np.int64)).reshape(-1)
        taps = (taps[:, None] * size + np.array(axis.taps, np.int64)).reshape(-1)
    return Grid(in_rows, out_rows, deltas, taps)


def common_halo(phases: Sequence[tuple[Axis, ...]]) -> Halo:
    """The padding that the outputs of all `phases` together see."""
    return tuple(
        (max(axis.halo[0] for axis in same), max(axis.halo[1] for axis in same))
        for same in zip(*phases, strict=True)
    )


def pad_channels_last(values: Tensor, halo: Halo) -> Tensor:
    """``[batch, channels, *grid]`` as ``[batch, *padded grid, channels]``, zeros around."""
    moved = values.movedim(1, -1)
    if not any(before or behind for before, behind in halo):
        return moved.contiguous()
    sides: list[int] = [0, 0]
    for before, behind in reversed(halo):
        sides += [before, behind]
    return torch.nn.functional.pad(moved, sides).contiguous()
