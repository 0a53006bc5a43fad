"""Dense convolutions with torch alone: gathered pixels, one exact matrix product a block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bevquant_int8sim._grid import common_halo, make_grid, pad_channels_last
from bevquant_int8sim._grid_axes import Axis
from bevquant_int8sim._matmul import exact_matmul

__all__ = ["accumulate"]

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

    The arguments are those of the compiled `convolve`.
    """
    groups, _, in_channels, out_channels = weight.shape
    halo = common_halo(phases)
    pixels = pad_channels_last(x, halo).view(-1, x.shape[1])
    sizes = tuple(axis.out_size for axis in phases[0])
    dtype = torch.int32 if fits_int32 else torch.int64
    shape = (x.shape[0] * math.prod(sizes), groups * out_channels)
    acc = torch.zeros(shape, dtype=dtype, device=x.device)
    for axes in phases:
        grid = make_grid(x.shape[0], axes, kernel, halo)
        names = (grid.in_rows, grid.out_rows, grid.deltas, grid.taps)
        in_rows, out_rows, deltas, taps = (torch.from_numpy(a).to(x.device) for a in names)
        if not len(deltas):
            continue
        matrices = weight.index_select(1, taps).reshape(groups, -1, out_channels)
        block = max(1, _BLOCK_VALUES // (len(deltas) * x.shape[1]))
        for start in range(0, len(in_rows), block):
            places = (in_rows[start : start + block, None] + deltas).view(-1)
            seen = pixels.index_select(0, places).view(-1, len(deltas), groups, in_channels)
            for group, matrix in enumerate(matrices):
                columns = seen[:, :, group].reshape(len(seen), -1)
                part = slice(group * out_channels, (group + 1) * out_channels)
                acc[out_rows[start : start + block], part] = exact_matmul(
                    columns, matrix, fits_int32=fits_int32
                )
    if bias is not None:
        acc += bias.to(dtype)
    return acc.view(x.shape[0], *sizes, -1).movedim(-1, 1)
