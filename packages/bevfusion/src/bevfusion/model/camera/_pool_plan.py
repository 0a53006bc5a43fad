"""Which points lie in which cell of the map: what pooling sums."""

from __future__ import annotations

from dataclasses import dataclass

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
