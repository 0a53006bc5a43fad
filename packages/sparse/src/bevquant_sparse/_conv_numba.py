"""The sparse convolution in float32 on a CPU: blocks of output rows on all of torch's threads.

    out[o] = bias + Σ_k features[neighbours[o, k]] @ weight[k]

Every output element is one chain of fused multiply-adds, over the offsets and within them over
the input channels, whatever thread or tile it falls to: bit-identical at any number of threads,
whatever other rows there are, and with AVX2 and AVX-512 alike.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from bevquant_sparse import _conv_torch
from bevquant_sparse._conv_kernels import (
    CHANNELS,
    LANES,
    WIDEST,
    Plan,
    convolve_block,
    outer_products,
    plan_for,
)
from bevquant_sparse._shapes import Float
from bevquant_sparse._table import Table
from bevquant_sparse.runtime.threads import share

_CHANNELS_PER_TASK = 48  # of the weight gradient; a multiple of 4 and of 6


def forward(
    features: Float[Tensor, "num_in in_channels"],
    weight: Float[Tensor, "volume in_channels out_channels"],
    bias: Float[Tensor, " out_channels"] | None,
    table: Table,
) -> Float[Tensor, "num_out out_channels"]:
    """Sparse convolution with the weight in ``VCK``."""
    if 0 in (table.num_in, table.num_out, *weight.shape):
        return _conv_torch.forward(features, weight, bias, table)
    plan = plan_for(table, _block_rows(weight.shape[2]), backwards=False)
    return _convolve(features, weight, bias, plan, table.num_out)


def grad_features(
    grad_out: Float[Tensor, "num_out out_channels"],
    weight: Float[Tensor, "volume in_channels out_channels"],
    table: Table,
) -> Float[Tensor, "num_in in_channels"]:
    """Gradient of the features: the inverse rulebook's convolution with transposed weights."""
    if 0 in (table.num_in, table.num_out, *weight.shape):
        return _conv_torch.grad_features(grad_out, weight, table)
    plan = plan_for(table, _block_rows(weight.shape[1]), backwards=True)
    return _convolve(grad_out, weight.transpose(1, 2), None, plan, table.num_in)


def grad_weight(
    features: Float[Tensor, "num_in in_channels"],
    grad_out: Float[Tensor, "num_out out_channels"],
    table: Table,
) -> Float[Tensor, "volume in_channels out_channels"]:
    """Gradient of the weight in ``VCK``: per offset, the outer products of its pairs."""
    in_channels, out_channels = features.shape[1], grad_out.shape[1]
    if 0 in (table.num_in, table.num_out, in_channels, out_channels):
        return _conv_torch.grad_weight(features, grad_out, table)
    plan = plan_for(table, _block_rows(out_channels), backwards=False)
    x = _padded(features, CHANNELS)
    g = _padded(grad_out, LANES)
    grad = x.new_zeros(plan.volume, x.shape[1], g.shape[1])
    channels = range(0, x.shape[1], _CHANNELS_PER_TASK)
    pairs = (plan.num_blocks, plan.bounds, plan.in_rows, plan.out_rows)
    arrays = (x.numpy(), g.numpy(), grad.numpy())
    tasks = [
        (offset, first, min(first + _CHANNELS_PER_TASK, x.shape[1]), *pairs, *arrays, *group)
        for group in _column_groups(g.shape[1])
        for first in channels
        for offset in range(plan.volume)
    ]
    share(lambda number: outer_products(*tasks[number]), len(tasks))
    return grad[:, :in_channels, :out_channels].contiguous()


def _convolve(
    features: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, num_rows: int
) -> Tensor:
    out_channels = weight.shape[2]
    x = features.detach().contiguous()
    columns = -(-out_channels // LANES) * LANES
    missing = columns - out_channels
    offset = x.new_zeros(columns) if bias is None else pad(bias.detach(), (0, missing))
    if missing:
        weight = pad(weight, (0, missing))
    groups = [
        (column, width, weight.detach()[:, :, column : column + width * LANES].contiguous())
        for column, width in _column_groups(columns)
    ]
    out = x.new_empty(num_rows, columns)
    x_array, bias_array, out_array = x.numpy(), offset.contiguous().numpy(), out.numpy()
    rows = (plan.block_rows, plan.bounds, plan.in_rows, plan.out_rows)
    tasks = [
        (block, *rows, x_array, packed.numpy(), bias_array, out_array, column, width)
        for block in range(plan.num_blocks)
        for column, width, packed in groups
    ]
    share(lambda number: convolve_block(*tasks[number]), len(tasks))
    return out[:, :out_channels].contiguous() if missing else out


def _column_groups(columns: int) -> list[tuple[int, int]]:
    """First column and number of vectors of each group a tile can hold."""
    step = WIDEST * LANES
    return [(start, min(step, columns - start) // LANES) for start in range(0, columns, step)]


def _block_rows(channels: int) -> int:
    """Output rows of a block: their accumulators, and the rows they read, stay in the cache."""
    return 512 if channels > 32 else 1024


def _padded(values: Tensor, multiple: int) -> Tensor:
    missing = -values.shape[1] % multiple
    values = values.detach()
    return pad(values, (0, missing)) if missing else values.contiguous()
