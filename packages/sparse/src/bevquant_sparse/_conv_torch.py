"""The sparse convolution with torch alone: gather, multiply, scatter, one kernel offset at a time.

    out[o] = bias + Σ_k features[neighbours[o, k]] @ weight[k]

Offsets are taken in a fixed order and within one offset every output row occurs at most once, so
no two additions ever meet: the sum of each row has one order, on every device and at any number
of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor

from bevquant_sparse._conv_matmul import matmul, matmul_transposed
from bevquant_sparse._shapes import Float
from bevquant_sparse._table import Table

# An offset under which every row meets itself (the centre of SubM) needs no gather.
_Pairs = tuple[int, Tensor | None, Tensor | None]


def forward(
    features: Float[Tensor, "num_in in_channels"],
    weight: Float[Tensor, "volume in_channels out_channels"],
    bias: Float[Tensor, " out_channels"] | None,
    table: Table,
) -> Float[Tensor, "num_out out_channels"]:
    """Sparse convolution with the weight in ``VCK``."""
    out = features.new_zeros(table.num_out, weight.shape[2])
    if bias is not None:
        out += bias
    for offset, in_rows, out_rows in _offsets(table):
        _scatter_add(out, out_rows, matmul(features, weight[offset], in_rows))
    return out


def grad_features(
    grad_out: Float[Tensor, "num_out out_channels"],
    weight: Float[Tensor, "volume in_channels out_channels"],
    table: Table,
) -> Float[Tensor, "num_in in_channels"]:
    """Gradient of the features: the pairs walked backwards with transposed weights."""
    grad = grad_out.new_zeros(table.num_in, weight.shape[1])
    for offset, in_rows, out_rows in _offsets(table):
        _scatter_add(grad, in_rows, matmul(grad_out, weight[offset].t(), out_rows))
    return grad


def grad_weight(
    features: Float[Tensor, "num_in in_channels"],
    grad_out: Float[Tensor, "num_out out_channels"],
    table: Table,
) -> Float[Tensor, "volume in_channels out_channels"]:
    """Gradient of the weight in ``VCK``: per offset, gathered features times gathered gradient."""
    grad = features.new_zeros(table.kernel_volume, features.shape[1], grad_out.shape[1])
    for offset, in_rows, out_rows in _offsets(table):
        grad[offset] = matmul_transposed(_gather(features, in_rows), _gather(grad_out, out_rows))
    return grad


def _offsets(table: Table) -> Iterator[_Pairs]:
    in_rows, out_rows, bounds = table.pairs
    for offset, (start, stop) in enumerate(pairwise(bounds)):
        if start == stop:
            continue
        if table.subm and 2 * offset + 1 == table.kernel_volume:
            yield offset, None, None
        else:
            yield offset, in_rows[start:stop], out_rows[start:stop]


def _gather(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values.index_select(0, rows)


def _scatter_add(out: Tensor, rows: Tensor | None, values: Tensor) -> None:
    if rows is None:
        out += values
    else:
        # Rows are unique: a gather, an addition and a copy, each parallel and free of collisions.
        out.index_copy_(0, rows, out.index_select(0, rows).add_(values))
