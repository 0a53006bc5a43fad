"""Objects that two runs both choose, counted: for rows behind a top-k, a mask or `nonzero`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Matched = tuple[int, int, int]
"""Objects that both runs choose, and the number that each one chooses."""


def masks(own: Tensor, other: Tensor) -> Matched:
    """Of two masks of one shape.

    Example:
        >>> masks(torch.tensor([True, True, False]), torch.tensor([False, True, False]))
        (1, 2, 1)
    """
    return int((own & other).sum()), int(own.sum()), int(other.sum())


def places(own: Tensor, other: Tensor) -> Matched:
    """Of two results of `torch.nonzero`, int64 ``[objects, axes]``.

    Example:
        >>> places(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[2, 3]]))
        (1, 2, 1)
    """
    rows = torch.cat([own, other]).unique(dim=0, return_counts=True)[1]
    return int((rows == 2).sum()), len(own), len(other)


def values(own: Tensor, other: Tensor) -> Matched:
    """Of two tensors with one index at each position, as of `torch.argmax`.

    Example:
        >>> values(torch.tensor([4, 7]), torch.tensor([4, 9]))
        (1, 2, 2)
    """
    return int((own == other).sum()), own.numel(), other.numel()


def lines(own: Tensor, other: Tensor, axis: int) -> Matched:
    """Of indices in any order along an axis, as of `torch.topk`; each line is counted by itself.

    Example:
        >>> lines(torch.tensor([[5, 2, 8]]), torch.tensor([[2, 5, 1]]), 1)
        (2, 3, 3)
    """
    own, other = own.movedim(axis, -1).sort(-1)[0], other.movedim(axis, -1).contiguous()
    place = torch.searchsorted(own, other).clamp_(max=max(own.shape[-1] - 1, 0))
    return int((own.take_along_dim(place, -1) == other).sum()), own.numel(), other.numel()


def fewest(counts: Iterable[Matched]) -> Matched:
    """The counts with the smallest share in common.

    Example:
        >>> fewest([(3, 4, 4), (1, 2, 2), (0, 0, 0)])
        (0, 0, 0)
    """
    return min(counts, key=lambda m: m[0] / max(*m, 1))
