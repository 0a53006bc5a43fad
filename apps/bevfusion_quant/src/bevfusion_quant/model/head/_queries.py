"""Which cells of the heatmap become queries."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["best_queries", "local_maxima"]


def local_maxima(scores: Tensor, kernel: int, every_cell: Tensor) -> Tensor:
    """`scores` where they are the largest of their surroundings, 0 elsewhere.

    Cells closer to the border than half the kernel are never local maxima, as in mit-bevfusion.
    NaN is never a maximum.

    Args:
        scores: float [batch, classes, x, y], none negative.
        kernel: Side of the square, odd.
        every_cell: bool [1, classes, 1, 1]: classes in which every cell counts as a maximum.
    """
    margin = kernel // 2
    largest = F.pad(F.max_pool2d(scores, kernel, stride=1), (margin,) * 4)
    kept = (scores == largest) | (every_cell & (scores >= 0))
    return scores.masked_fill(~kept, 0.0)


def best_queries(scores: Tensor, count: int) -> Tensor:
    """The positions of the `count` largest scores, best first, int64 [batch, count].

    A position numbers class, x and y, in this order of significance. Of equal scores the lower
    position comes first, whatever the machine: torch.topk and an unstable sort promise no order.

    Args:
        scores: float [batch, classes, x, y].
        count: At most classes · x · y.
    """
    order = scores.flatten(1).sort(dim=-1, descending=True, stable=True).indices
    return order[:, :count]
