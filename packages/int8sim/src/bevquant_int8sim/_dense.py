"""Common parts of dense layers with a weight: checks, a backend, torch's sums, output."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bevquant_int8sim._backends import choose_backend
from bevquant_int8sim._grid_axes import Axis, make_grid
from bevquant_int8sim._matmul import exact_matmul
from bevquant_int8sim._output import Output
from bevquant_int8sim._prepared import Memo, remembered
from bevquant_int8sim._scales import (
    check_accumulators,
    check_integer_tensor,
    fits_by_type,
    fits_by_values,
    sums_of_sizes,
)

_VECTOR = 16  # output channels that the kernels compute at once
_BLOCK_VALUES = 2**24  # gathered values of a block


def check_operands(x: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> None:
    """Refuse operands of wrong types or devices."""
    check_integer_tensor(name, "x", x, (torch.int8, torch.int16))
    check_integer_tensor(name, "weight", weight, (torch.int8,))
    if bias is not None:
        check_integer_tensor(name, "bias", bias, (torch.int32,))
    for what, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.device != x.device:
            raise ValueError(f"{name}: {what} on {value.device}, x on {x.device}; move one of them")


def check_bias(bias: Tensor | None, channels: int, name: str) -> None:
    """Refuse a bias of another length than `channels`."""
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(f"{name}: expected bias [{channels}], got {tuple(bias.shape)}")


def run_dense(
    x: Tensor,
    owner: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    phases: Sequence[tuple[Axis, ...]],
    kernel: tuple[int, ...],
    output: Output,
    backend: str,
    name: str,
    memo: Memo | None = None,
) -> Tensor:
    """Convolve checked operands ``[batch, channels, *grid]``.

    `weight` is `owner` as ``[groups, volume, in channels, out channels]``; what is made of it is
    kept as long as `owner` lives. `memo` keeps what depends on nothing but shapes.
    """
    chosen = choose_backend(backend, x.device, x.dtype, name)
    if 0 in (*x.shape, *weight.shape):
        return output.finish(_sums_of_nothing(x, weight, bias, phases), 1)
    view = (tuple(weight.shape), weight.stride())
    sums = remembered(
        owner, ("sums", view), lambda: sums_of_sizes(weight.permute(0, 3, 1, 2).flatten(0, 1), 0)
    )
    safe = fits_by_type(x, sums, bias)
    fits = safe or fits_by_values(x, sums, bias)
    if fits and chosen != "torch":
        from bevquant_int8sim._compiled.dense import prepare

        shape, make = _joined_shape(weight), functools.partial(_joined, weight)
        if x.dtype == torch.int16:
            chosen += "16"
        prepared = prepare(x, (owner, view), shape, make, bias, phases, kernel, output, chosen)
        # By values, sums fit for this frame alone.
        if memo is not None and safe:
            memo.keep(prepared)
        return prepared(x, output.addend)
    acc = _accumulated(x, weight, bias, phases, kernel, fits_int32=fits)
    if not fits:
        check_accumulators(acc, name, channel_axis=1)
    return output.finish(acc.to(torch.int32), 1)


def _accumulated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    phases: Sequence[tuple[Axis, ...]],
    kernel: tuple[int, ...],
    *,
    fits_int32: bool,
) -> Tensor:
    """Sums ``[batch, all out channels, *grid]`` by torch: gathered pixels, one product a block.

    int32, or int64 where no bound shows that they fit; operands as `run_dense` takes them.
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


def _sums_of_nothing(
    x: Tensor, weight: Tensor, bias: Tensor | None, phases: Sequence[tuple[Axis, ...]]
) -> Tensor:
    """Accumulators of a layer without inputs or outputs: the bias, if anything."""
    sizes = [axis.out_size for axis in phases[0]]
    acc = x.new_zeros(len(x), *sizes, weight.shape[0] * weight.shape[3], dtype=torch.int32)
    return (acc if bias is None else acc + bias).movedim(-1, 1)


def _joined_shape(weight: Tensor) -> tuple[int, int, int, int]:
    groups, volume, inputs, outputs = weight.shape
    fitting = (n for n in range(1, groups + 1) if groups % n == 0)
    count = next((n for n in fitting if n * outputs >= _VECTOR), groups)
    return groups // count, volume, count * inputs, count * outputs


def _joined(weight: Tensor) -> Tensor:
    """Join groups until they fill a vector of output channels, with zeros between them."""
    groups, volume, inputs, outputs = weight.shape
    shape = _joined_shape(weight)
    count = groups // shape[0]
    if count == 1:
        return weight
    # A depthwise convolution then multiplies 16 times what it must, in 16 lanes that would
    # otherwise be idle.
    wide = weight.new_zeros(shape[0], volume, count, inputs, count, outputs)
    for i in range(count):
        wide[:, :, i, :, i] = weight[i::count]
    return wide.view(shape)
