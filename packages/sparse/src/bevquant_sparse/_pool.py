"""Pooling over the present voxels of each window."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bevquant_sparse._conv import check_features
from bevquant_sparse._rulebook import Rulebook


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
    out: Tensor = _MaxPool.apply(features, rulebook)  # type: ignore[no-untyped-call]
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
    half = features.dtype in (torch.float16, torch.bfloat16)
    values = features.float() if half else features
    out: Tensor = _AvgPool.apply(values, rulebook)  # type: ignore[no-untyped-call]
    return out.to(features.dtype)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, rulebook: Rulebook) -> Tensor:
        out = features.new_zeros(rulebook.num_out, features.shape[1])
        winner = torch.full_like(out, -1, dtype=torch.int64)
        for in_rows, out_rows in _pairs(rulebook):
            value, best = features[in_rows], out[out_rows]
            held = winner[out_rows]
            # A later row wins only where strictly greater, or as the window's first NaN.
            wins = (held < 0) | (value > best) | (value.isnan() & ~best.isnan())
            out[out_rows] = torch.where(wins, value, best)
            winner[out_rows] = torch.where(wins, in_rows[:, None], held)
        ctx.save_for_backward(winner)
        ctx.rulebook = rulebook
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        (winner,) = ctx.saved_tensors
        rulebook = ctx.rulebook
        grad = grad_out.new_zeros(rulebook.num_in, grad_out.shape[1])
        # Per offset an input row occurs once, so that the additions have one order.
        for in_rows, out_rows in _pairs(rulebook):
            won = winner[out_rows] == in_rows[:, None]
            grad[in_rows] += grad_out[out_rows].where(won, 0.0)
        return grad, None


class _AvgPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, rulebook: Rulebook) -> Tensor:
        ctx.rulebook = rulebook
        out = features.new_zeros(rulebook.num_out, features.shape[1])
        for in_rows, out_rows in _pairs(rulebook):
            out[out_rows] += features[in_rows]
        return out / _counts(rulebook, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None]:
        rulebook = ctx.rulebook
        share = grad_out / _counts(rulebook, grad_out)
        grad = grad_out.new_zeros(rulebook.num_in, grad_out.shape[1])
        for in_rows, out_rows in _pairs(rulebook):
            grad[in_rows] += share[out_rows]
        return grad, None


def _pairs(rulebook: Rulebook) -> Iterator[tuple[Tensor, Tensor]]:
    in_rows, out_rows, bounds = rulebook.pairs
    for start, stop in pairwise(bounds):
        yield in_rows[start:stop], out_rows[start:stop]


def _counts(rulebook: Rulebook, like: Tensor) -> Tensor:
    return (rulebook.neighbours >= 0).sum(1, keepdim=True).clamp(min=1).to(like.dtype)
