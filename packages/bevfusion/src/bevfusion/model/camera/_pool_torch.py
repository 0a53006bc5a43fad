"""The points that each cell of the map sums, and the sums in torch, for any device and float type.

The sums are those of the CPU's kernels in the same order. Points are taken in runs of whole cells,
so that the weighted vectors of all of them are never in memory together; a segmented reduction, not
an atomic addition, adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PoolPlan:
    """Which points each cell sums, and in which order: that of their numbers.

    Attributes:
        cells: int32 [points]: the cell of each point, negative outside.
        order: int32 [points inside]: point numbers by cell, and by number within a cell.
        starts: int64 [cells + 1]: where each cell's points start in `order`.
        blocks: Ranges of cells of about equal work: cell `blocks[i]` to `blocks[i + 1]`.
    """

    cells: Tensor
    order: Tensor
    starts: Tensor
    blocks: tuple[int, ...]

    @property
    def num_cells(self) -> int:
        """Number of cells."""
        return self.starts.numel() - 1

    def pixels(self, bins: int, positions: int) -> Tensor:
        """The context vector of each point of `order`, for points numbered (image, bin, position).

        Returns:
            int32 [points inside]: image · positions + position.
        """
        image = self.order.div(bins * positions, rounding_mode="floor")
        return image.mul_(positions).add_(self.order.remainder(positions))


_RUN = 1 << 17  # points whose vectors are in memory together


def pool(features: Tensor, plan: PoolPlan) -> Tensor:
    """Σ features[p] over the points p of each cell: [points, channels] → [cells, channels]."""
    order = plan.order.long()
    return _reduce(lambda run: features[order[run]].double(), features, plan)


def lift(depth: Tensor, rows: Tensor, plan: PoolPlan) -> Tensor:
    """Σ depth[p] · rows[pixel of p] over the points p of each cell, numbered in depth's order."""
    order, weights = plan.order.long(), depth.reshape(-1)
    pixels = plan.pixels(depth.shape[1], depth.shape[2] * depth.shape[3]).long()

    def weighted(run: slice) -> Tensor:
        return rows[pixels[run]].double().mul_(weights[order[run]].double()[:, None])

    return _reduce(weighted, rows, plan)


def lift_backward(
    grad: Tensor, depth: Tensor, rows: Tensor, plan: PoolPlan
) -> tuple[Tensor, Tensor]:
    """Gradients of `depth` and `rows`, given that of the output, [cells, channels]."""
    cells = plan.cells.view(depth.shape).long()
    context = rows.double()
    grad_depth = torch.empty_like(depth)
    grad_rows = torch.zeros_like(context)
    # Every pixel sums over its bins in their order, as in the CPU's kernels.
    for d in range(depth.shape[1]):
        cell = cells[:, d].reshape(-1)
        slope = grad[cell.clamp_min(0)].double().masked_fill_((cell < 0)[:, None], 0.0)
        grad_depth[:, d] = (slope * context).sum(1).view_as(depth[:, d]).to(depth.dtype)
        grad_rows += slope.mul_(depth[:, d].reshape(-1, 1).double())
    return grad_depth, grad_rows.to(rows.dtype)


def _reduce(values: Callable[[slice], Tensor], like: Tensor, plan: PoolPlan) -> Tensor:
    out = like.new_zeros(plan.num_cells, like.shape[1])
    for first, stop, run in _runs(plan):
        edges = plan.starts[first : stop + 1] - run.start
        sums = torch.segment_reduce(values(run), "sum", offsets=edges, axis=0, initial=0.0)
        out[first:stop] = sums.to(out.dtype)
    return out


def _runs(plan: PoolPlan) -> Iterator[tuple[int, int, slice]]:
    """Ranges of cells, and of their points in `order`, of at least a run's points each."""
    edges = list(zip(plan.blocks, plan.starts[list(plan.blocks)].tolist(), strict=True))
    first, begin = edges[0]
    for cell, point in edges[1:]:
        if point - begin >= _RUN or cell == plan.num_cells:
            if point > begin:
                yield first, cell, slice(begin, point)
            first, begin = cell, point
