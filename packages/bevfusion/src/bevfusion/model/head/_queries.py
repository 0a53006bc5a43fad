"""Which cells of the heatmap become queries."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, fx, nn

fx.wrap("best_queries")


class QueryPicker(nn.Module):
    """`best_queries` as a step of the model that a hook can replace.

    A hair's breadth in the heatmap changes which cells become queries and in which order, so that
    query 7 of a quantized head is another object than query 7 of the float one. To compare the
    layers behind the queries, let the quantized head look where the float one looks:

    Example:
        >>> import torch
        >>> from bevfusion.model.head import QueryPicker
        >>> picked = []
        >>> first, second = QueryPicker(2), QueryPicker(2)
        >>> _ = first.register_forward_hook(lambda module, args, out: picked.append(out))
        >>> _ = second.register_forward_hook(lambda module, args, out: picked.pop())
        >>> first(torch.tensor([[[[0.1, 0.4, 0.3]]]])).tolist()
        [[1, 2]]
        >>> second(torch.tensor([[[[0.1, 0.3, 0.4]]]])).tolist()
        [[1, 2]]
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, scores: Tensor) -> Tensor:
        """Positions, int64 [batch, count], of the largest of float [batch, classes, x, y]."""
        return best_queries(scores, self.count)


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
