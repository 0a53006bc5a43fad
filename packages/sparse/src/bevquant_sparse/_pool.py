"""Pooling over the present voxels of each window."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bevquant_sparse._conv import check_features, wide
from bevquant_sparse._operator import operator
from bevquant_sparse._rulebook import Rulebook
from bevquant_sparse._table import Table


def sparse_max_pool(features: Tensor, rulebook: Rulebook) -> Tensor:
    """Maximum over the present voxels of each window, as spconv's ``SparseMaxPool``.

    ::

        out[o, c] = max over k with a neighbour of features[n(o, k), c]

    Absent voxels count as missing, not as 0: the result can be negative. NaN propagates. An
    output row without any neighbour (only hand-made rulebooks have one) is 0. The gradient goes
    to the first maximum in offset order (the first NaN where there is one). Deterministic forward
    and backward at any number of threads.

    Args:
        features: ``[num_in, channels]``, floating point, one row per ``rulebook.in_indices``.
        rulebook: The windows, on the same device.

    Returns:
        ``[num_out, channels]`` in the dtype of ``features``.

    Raises:
        TypeError: ``features`` are not floating point.
        ValueError: Their shape or device does not fit the rulebook.

    Example:
        >>> import torch
        >>> from bevquant_sparse import build_rulebook, sparse_max_pool
        >>> indices = torch.tensor([[0, 0], [0, 1], [0, 6]], dtype=torch.int32)
        >>> rulebook = build_rulebook(indices, [8], 2, 2, subm=False, batch_size=1)
        >>> sparse_max_pool(torch.tensor([[1.0], [-2.0], [-3.0]]), rulebook).flatten()
        tensor([ 1., -3.])
    """
    check_features("sparse_max_pool", features, rulebook)
    out: Tensor = _max_pool(features, rulebook.neighbours)
    return out


def sparse_avg_pool(features: Tensor, rulebook: Rulebook) -> Tensor:
    """Mean over the present voxels of each window, as spconv's ``SparseAvgPool``.

    ::

        out[o, c] = Σ_k features[n(o, k), c] / (number of k with a neighbour)

    The divisor counts present voxels only, unlike dense pooling. Summed in offset order, half
    types in float32. NaN propagates; an output row without any neighbour is 0. Deterministic
    forward and backward at any number of threads.

    Args:
        features: ``[num_in, channels]``, floating point, one row per ``rulebook.in_indices``.
        rulebook: The windows, on the same device.

    Returns:
        ``[num_out, channels]`` in the dtype of ``features``.

    Raises:
        TypeError: ``features`` are not floating point.
        ValueError: Their shape or device does not fit the rulebook.

    Example:
        >>> import torch
        >>> from bevquant_sparse import build_rulebook, sparse_avg_pool
        >>> indices = torch.tensor([[0, 0], [0, 1], [0, 6]], dtype=torch.int32)
        >>> rulebook = build_rulebook(indices, [8], 2, 2, subm=False, batch_size=1)
        >>> sparse_avg_pool(torch.tensor([[1.0], [-2.0], [-3.0]]), rulebook).flatten()
        tensor([-0.5000, -3.0000])
    """
    check_features("sparse_avg_pool", features, rulebook)
    out: Tensor = _avg_pool(features, rulebook.neighbours)
    return out


@operator("max_pool(Tensor features, Tensor neighbours) -> Tensor")
def _max_pool(features: Tensor, neighbours: Tensor) -> Tensor:
    """``sparse_max_pool`` of operands that fit each other."""
    return _maxima(features, neighbours)[0]


@operator("avg_pool(Tensor features, Tensor neighbours) -> Tensor")
def _avg_pool(features: Tensor, neighbours: Tensor) -> Tensor:
    """``sparse_avg_pool`` of operands that fit each other."""
    values = wide(features)
    out = values.new_zeros(neighbours.shape[0], features.shape[1])
    for in_rows, out_rows in _pairs(features, neighbours):
        out[out_rows] += values[in_rows]
    return (out / _counts(neighbours, out)).to(features.dtype)


@operator("max_pool_grad(Tensor grad_out, Tensor features, Tensor neighbours) -> Tensor")
def _max_pool_grad(grad_out: Tensor, features: Tensor, neighbours: Tensor) -> Tensor:
    """Gradient of ``max_pool``: the winners are found anew, so the forward returns no more."""
    winner = _maxima(features, neighbours)[1]
    grad = torch.zeros_like(features)
    # Per offset an input row occurs once, so that the additions have one order.
    for in_rows, out_rows in _pairs(features, neighbours):
        won = winner[out_rows] == in_rows[:, None]
        grad[in_rows] += grad_out[out_rows].where(won, 0.0)
    return grad


@operator("avg_pool_grad(Tensor grad_out, Tensor features, Tensor neighbours) -> Tensor")
def _avg_pool_grad(grad_out: Tensor, features: Tensor, neighbours: Tensor) -> Tensor:
    """Gradient of ``avg_pool``; of ``features`` the shape alone counts."""
    values = wide(grad_out)
    share = values / _counts(neighbours, values)
    grad = values.new_zeros(features.shape)
    for in_rows, out_rows in _pairs(features, neighbours):
        grad[in_rows] += share[out_rows]
    return grad.to(features.dtype)


@_max_pool.register_fake
@_avg_pool.register_fake
def _(features: Tensor, neighbours: Tensor) -> Tensor:
    return features.new_empty(neighbours.shape[0], features.shape[1])


@_max_pool_grad.register_fake
@_avg_pool_grad.register_fake
def _(grad_out: Tensor, features: Tensor, neighbours: Tensor) -> Tensor:
    return features.new_empty(features.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_max_pool.register_autograd(
    lambda ctx, grad_out: (_max_pool_grad(grad_out, *ctx.saved_tensors), None),
    setup_context=_keep_for_backward,
)
_avg_pool.register_autograd(
    lambda ctx, grad_out: (_avg_pool_grad(grad_out, *ctx.saved_tensors), None),
    setup_context=_keep_for_backward,
)


def _maxima(features: Tensor, neighbours: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum of each window and the input row that it comes from."""
    out = features.new_zeros(neighbours.shape[0], features.shape[1])
    winner = torch.full_like(out, -1, dtype=torch.int64)
    for in_rows, out_rows in _pairs(features, neighbours):
        value, best = features[in_rows], out[out_rows]
        held = winner[out_rows]
        # A later row wins only where strictly greater, or as the window's first NaN.
        wins = (held < 0) | (value > best) | (value.isnan() & ~best.isnan())
        out[out_rows] = torch.where(wins, value, best)
        winner[out_rows] = torch.where(wins, in_rows[:, None], held)
    return out, winner


def _pairs(features: Tensor, neighbours: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    in_rows, out_rows, bounds = Table(neighbours, features.shape[0], subm=False).pairs
    for start, stop in pairwise(bounds):
        yield in_rows[start:stop], out_rows[start:stop]


def _counts(neighbours: Tensor, like: Tensor) -> Tensor:
    return (neighbours >= 0).sum(1, keepdim=True).clamp(min=1).to(like.dtype)
