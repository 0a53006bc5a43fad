"""The sparse convolution with torch alone: gather, multiply, scatter, step by step.

    out[o] = bias + Σ_k features[neighbours[o, k]] @ weight[k]

A step takes one kernel offset and the rows that have a neighbour under it, or, where few are
missing or channels are few, several offsets and all rows: their neighbours lie side by side, zeros
for those that are missing, and one product serves them all. That multiplies more and moves less.

Steps are taken in a fixed order and within one step every output row occurs at most once, so
no two additions ever meet: the sum of each row has one order, on every device and at any number
of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from bevquant_sparse._conv_matmul import TERMS, GatheredProduct, matmul_transposed
from bevquant_sparse._shapes import Float
from bevquant_sparse._table import Table

# What it costs to move a row of a step, each of its output channels, and each of its neighbours,
# beside one multiplication: measured on Zen 4. Only speed rests on it.
_ROW, _CHANNEL, _NEIGHBOUR = 3200, 32, 200


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
    if width := _offsets_at_once(table, weight):
        features = torch.cat((features, features.new_zeros(1, features.shape[1])))
        product = GatheredProduct(features, weight.shape[2])
        for start in range(0, table.kernel_volume, width):
            some = slice(start, start + width)
            sources = table.neighbours[:, some]
            sources = torch.where(sources < 0, table.num_in, sources)
            for rows, values in product(sources, weight[some].flatten(0, 1)):
                out[rows] += values
        return out
    product = GatheredProduct(features, weight.shape[2])
    for offset, in_rows, out_rows in _pairs(table):
        for rows, values in product(in_rows.unsqueeze(1), weight[offset]):
            out.index_add_(0, out_rows[rows], values)
    return out


def grad_features(
    grad_out: Float[Tensor, "num_out out_channels"],
    weight: Float[Tensor, "volume in_channels out_channels"],
    table: Table,
) -> Float[Tensor, "num_in in_channels"]:
    """Gradient of the features: the pairs walked backwards with transposed weights."""
    backwards = Table(table.inverse, table.num_out, table.subm)
    return forward(grad_out, weight.transpose(1, 2), None, backwards)


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


def _pairs(table: Table) -> Iterator[tuple[int, Tensor, Tensor]]:
    in_rows, out_rows, bounds = table.pairs
    for offset, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            yield offset, in_rows[start:stop], out_rows[start:stop]


def _offsets_at_once(table: Table, weight: Tensor) -> int:
    """How many offsets a step of all rows takes; 0 where steps of one offset cost less.

    Nor is it right to multiply zeros with what is not finite.
    """
    volume, inside, outside = weight.shape
    most = min(volume, TERMS // max(inside, 1))
    if most < 2 or weight.device.type != "cpu" or not bool(weight.isfinite().all()):
        return 0
    steps = -(-volume // most)
    row, neighbour = _ROW + _CHANNEL * outside, inside * outside + _NEIGHBOUR
    found = int((table.neighbours >= 0).sum())
    wide = table.num_out * (steps * row + volume * neighbour)
    return -(-volume // steps) if wide < found * (row + neighbour) else 0
