"""Dense convolutions through the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevquant_int8sim import _workspace
from bevquant_int8sim._grid import Halo, common_halo, make_grid
from bevquant_int8sim._grid_axes import Axis
from bevquant_int8sim._grid_numba import make_plan, run_grid
from bevquant_int8sim._output import Output
from bevquant_int8sim._packed import pack_weight
from bevquant_int8sim._threads import share

__all__ = ["convolve"]

_SLACK = 4  # channels behind the last that a step of the last group may read


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    phases: Sequence[tuple[Axis, ...]],
    kernel: tuple[int, ...],
    output: Output,
    kind: str,
) -> Tensor:
    """Convolve ``[batch, channels, *grid]``; the result is channels-last in memory.

    Args:
        x: int8 or int16.
        weight: int8 ``[groups, volume, in channels, out channels]``, both of one group.
        bias: int32 ``[all out channels]`` or ``None``.
        phases: The axes of each part of the outputs.
        kernel: Kernel extents, row-major volume.
        output: What becomes of the accumulators.
        kind: ``"vnni"`` or ``"portable"``.
    """
    groups, _, in_channels, out_channels = weight.shape
    halo = common_halo(phases)
    pixels = _prepare(x, halo, kind)
    sizes = tuple(axis.out_size for axis in phases[0])
    fused = output.fused(groups * out_channels)
    columns = (groups - 1) * out_channels + -(-out_channels // 16) * 16
    rows = x.shape[0] * int(np.prod(sizes))
    out = _workspace.empty((rows, columns), np.int32 if fused is None else np.int8)
    for axes in phases:
        grid = make_grid(x.shape[0], axes, kernel, halo)
        taps = torch.from_numpy(grid.taps)
        for group in range(groups):
            packed = pack_weight(weight[group].index_select(0, taps).numpy(), kind)
            plan = make_plan(grid.in_rows, grid.out_rows, grid.deltas, packed.rows)
            part = slice(group * out_channels, (group + 1) * out_channels)
            # What a group writes behind its own channels, the next one writes over.
            run_grid(
                pixels[:, group * in_channels :],
                packed,
                None if bias is None else bias[part].numpy(),
                plan,
                out[:, part.start :],
                None if fused is None else fused.part(part, packed.padded_outputs),
            )
    total = groups * out_channels
    result = torch.from_numpy(out)[:, :total].reshape(x.shape[0], *sizes, total).movedim(-1, 1)
    return result if fused is not None else output.finish(result, 1)


def _prepare(x: Tensor, halo: Halo, kind: str) -> npt.NDArray[Any]:
    """Pixels ``[batch · padded grid, channels]`` as the kernels read them."""
    values = x.movedim(1, -1).numpy()
    grid = values.shape[1:-1]
    padded = [n + sum(sides) for n, sides in zip(grid, halo, strict=True)]
    dtype, zero = (np.uint8, 128) if kind == "vnni" else (np.int16, 0)
    channels = -(-(values.shape[-1] + _SLACK) // _SLACK) * _SLACK
    block = _workspace.empty((len(values), *padded, channels), dtype)
    inside = tuple(slice(sides[0], sides[0] + n) for n, sides in zip(grid, halo, strict=True))

    def fill(number: int) -> None:
        sample, line = divmod(number, padded[0])
        block[sample, line] = zero
        row = line - halo[0][0]
        if 0 <= row < grid[0]:
            target = block[(sample, line, *inside[1:], slice(0, values.shape[-1]))]
            if zero:
                np.bitwise_xor(values[sample, row].view(np.uint8), zero, out=target)
            else:
                target[...] = values[sample, row]

    share(fill, len(values) * padded[0])
    return block.reshape(-1, channels)  # type: ignore[no-any-return]
