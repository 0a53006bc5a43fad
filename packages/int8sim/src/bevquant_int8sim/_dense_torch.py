"""Dense convolutions with torch alone: gathered pixels, one exact matrix product a block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bevquant_int8sim._grid import make_grid
from bevquant_int8sim._grid_axes import Axis
from bevquant_int8sim._matmul import exact_matmul

_BLOCK_VALUES = 2**24  # gathered values of a block


def accumulate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    phases: Sequence[tuple[Axis, ...]],
    kernel: tuple[int, ...],
    *,
    fits_int32: bool,
) -> Tensor:
    """Accumulators ``[batch, all out channels, *grid]``, int32 or (not `fits_int32`) int64.

    Args:
        x: int8 or int16 ``[batch, channels, *grid]``.
        weight: int8 ``[groups, volume, in channels, out channels]``.
        bias: int32 ``[all out channels]`` or ``None``.
        phases: The axes of each part of the outputs.
        kernel: Kernel extents, row-major volume.
        fits_int32: Whether a bound shows that no sum leaves int32.
    """
    groups, _, in_channels, out_channels = weight.shape
    pixels = x.movedim(1, -1).reshape(-1, x.shape[1])
    pixels = torch.cat([pixels.new_zeros(1, x.shape[1]), pixels])  # row 0 lies outside
    sizes = tuple(axis.out_size for axis in phases[0])
    dtype = torch.int32 if fits_int32 else torch.int64
    shape = (x.shape[0] * math.prod(sizes), groups * out_channels)
    acc = torch.zeros(shape, dtype=dtype, device=x.device)
    for axes in phases:
        grid = make_grid(x.shape[0], axes, kernel)
        if not len(grid.deltas):
            continue
        places = torch.from_numpy(grid.in_rows[:, None] + grid.deltas + 1)
        places[torch.from_numpy(~grid.whole)] = torch.from_numpy(grid.neighbours).long() + 1
        places, out_rows = places.to(x.device), torch.from_numpy(grid.out_rows).to(x.device)
        taps = torch.from_numpy(grid.taps).to(x.device)
        matrices = weight.index_select(1, taps).reshape(groups, -1, out_channels)
        block = max(1, _BLOCK_VALUES // (len(grid.deltas) * x.shape[1]))
        for start in range(0, len(places), block):
            seen = pixels.index_select(0, places[start : start + block].view(-1))
            seen = seen.view(-1, len(grid.deltas), groups, in_channels)
            for group, matrix in enumerate(matrices):
                columns = seen[:, :, group].reshape(len(seen), -1)
                part = slice(group * out_channels, (group + 1) * out_channels)
                acc[out_rows[start : start + block], part] = exact_matmul(
                    columns, matrix, fits_int32=fits_int32
                )
    if bias is not None:
        acc += bias.to(dtype)
    return acc.view(x.shape[0], *sizes, -1).movedim(-1, 1)
