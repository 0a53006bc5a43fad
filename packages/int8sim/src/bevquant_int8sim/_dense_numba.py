"""Dense convolutions through the compiled kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevquant_int8sim import _workspace
from bevquant_int8sim._grid import Halo, common_halo, make_grid
from bevquant_int8sim._grid_axes import Axis
from bevquant_int8sim._grid_numba import GridPlan, make_plan, run_grid
from bevquant_int8sim._output import Output
from bevquant_int8sim._packed import PackedWeight, pack_weight
from bevquant_int8sim._threads import share
from bevquant_int8sim._weight_cache import remembered

__all__ = ["convolve"]

_SLACK = 4  # channels behind the last that a step of the last group may read


def convolve(
    x: Tensor,
    owner: tuple[Tensor, Hashable],
    shape: tuple[int, int, int, int],
    make: Callable[[], Tensor],
    bias: Tensor | None,
    phases: Sequence[tuple[Axis, ...]],
    kernel: tuple[int, ...],
    output: Output,
    kind: str,
) -> Tensor:
    """Convolve ``[batch, channels, *grid]``; the result is channels-last in memory.

    Args:
        x: int8 or int16.
        owner: The tensor that packed weights are kept with, and which view of it this is.
        shape: ``[groups, volume, in channels, out channels]``, both of one group.
        make: The int8 weight of that shape; called only where it is not packed yet.
        bias: int32 ``[all out channels]`` or ``None``.
        phases: The axes of each part of the outputs.
        kernel: Kernel extents, row-major volume.
        output: What becomes of the accumulators.
        kind: ``"vnni"`` or ``"portable"``.
    """
    groups, _, in_channels, out_channels = shape
    halo = common_halo(phases)
    pixels = _prepare(x, halo, kind)
    sizes = tuple(axis.out_size for axis in phases[0])
    fused = output.fused(groups * out_channels)
    columns = (groups - 1) * out_channels + -(-out_channels // 16) * 16
    rows = x.shape[0] * int(np.prod(sizes))
    out = _workspace.empty((rows, columns), np.int32 if fused is None else np.int8)
    for axes in phases:
        for group in range(groups):
            packed = _packed(owner, make, group, axes, kernel, kind)
            plan = _plan(x.shape[0], axes, kernel, halo, packed.rows)
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


def _packed(
    owner: tuple[Tensor, Hashable],
    make: Callable[[], Tensor],
    group: int,
    axes: tuple[Axis, ...],
    kernel: tuple[int, ...],
    kind: str,
) -> PackedWeight:
    """The elements of the kernel that outputs of these axes see, packed once."""
    taps = np.zeros(1, np.int64)
    for axis, size in zip(axes, kernel, strict=True):
        taps = (taps[:, None] * size + np.array(axis.taps, np.int64)).reshape(-1)
    chosen = torch.from_numpy(taps)
    packed: PackedWeight = remembered(
        owner[0],
        (kind, owner[1], group, tuple(axis.taps for axis in axes)),
        lambda: pack_weight(make()[group].index_select(0, chosen).numpy(), kind),
    )
    return packed


@functools.lru_cache(maxsize=256)
def _plan(
    batch: int, axes: tuple[Axis, ...], kernel: tuple[int, ...], halo: Halo, tile_rows: int
) -> GridPlan:
    grid = make_grid(batch, axes, kernel, halo)
    return make_plan(grid.in_rows, grid.out_rows, grid.deltas, tile_rows)


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
