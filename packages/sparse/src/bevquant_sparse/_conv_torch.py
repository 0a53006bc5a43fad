"""The sparse convolution with torch alone: gather, multiply, scatter, one kernel offset at a time.

    out[o] = bias + Σ_k features[neighbours[o, k]] @ weight[k]

Offsets are taken in a fixed order and within one offset every output row occurs at most once, so
no two additions ever meet: the sum of each row has one order, on every device and at any number
of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from torch import Tensor

from bevquant_sparse._conv_matmul import GatheredProduct, matmul_transposed
from bevquant_sparse._shapes import Float
from bevquant_sparse._table import Table


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
    _add_products(out, features, weight, _pairs(table))
    return out


def grad_features(
    grad_out: Float[Tensor, "num_out out_channels"],
    weight: Float[Tensor, "volume in_channels out_channels"],
    table: Table,
) -> Float[Tensor, "num_in in_channels"]:
    """Gradient of the features: the pairs walked backwards with transposed weights."""
    grad = grad_out.new_zeros(table.num_in, weight.shape[1])
    backwards = ((offset, out_rows, in_rows) for offset, in_rows, out_rows in _pairs(table))
    _add_products(grad, grad_out, weight.transpose(1, 2), backwards)
    return grad


def grad_weight(
    features: Float[Tensor, "num_in in_channels"],
    grad_out: Float[Tensor, "num_out out_channels"],
    table: Table,
) -> Float[Tensor, "volume in_channels out_channels"]:
    """Gradient of the weight in ``VCK``: per offset, gathered features times gathered gradient."""
    grad = features.new_zeros(table.kernel_volume, features.shape[1], grad_out.shape[1])
    for offset, in_rows, out_rows in _pairs(table):
        seen, given = features.index_select(0, in_rows), grad_out.index_select(0, out_rows)
        grad[offset] = matmul_transposed(seen, given)
    return grad


def _add_products(
    out: Tensor, values: Tensor, weight: Tensor, pairs: Iterable[tuple[int, Tensor, Tensor]]
) -> None:
    product = GatheredProduct(values, weight.shape[2])
    for offset, sources, targets in pairs:
        for rows, made in product(sources, weight[offset]):
            out.index_add_(0, targets[rows], made)


def _pairs(table: Table) -> Iterator[tuple[int, Tensor, Tensor]]:
    in_rows, out_rows, bounds = table.pairs
    for offset, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            yield offset, in_rows[start:stop], out_rows[start:stop]
