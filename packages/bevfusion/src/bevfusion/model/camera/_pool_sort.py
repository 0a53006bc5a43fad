"""Points sorted by cell: worked out once per calibration, used by every pooling after."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bevfusion.model.camera._pool_plan import PoolPlan

_BLOCK = 1 << 15  # points and cells in one block of work


def make_pool_plan(cells: Tensor, num_cells: int) -> PoolPlan:
    """Sort points by cell.

    `bev_pool` and `lift_splat_pool` do it themselves for a tensor that they have not seen before,
    and remember the plan as long as the tensor lives unchanged.

    Args:
        cells: int64 or int32 [points], negative outside.
        num_cells: Cells of the map, all of the batch.

    Raises:
        ValueError: `cells` has another type or shape, or names a cell that is not there.

    Example:
        >>> plan = make_pool_plan(torch.tensor([1, -1, 0, 1]), 2)
        >>> plan.order.tolist(), plan.starts.tolist()
        ([2, 0, 3], [0, 1, 3])
    """
    if cells.dtype not in (torch.int64, torch.int32) or cells.dim() != 1:
        raise ValueError(
            f"cells is {cells.dtype} {list(cells.shape)}: expected int64 [points], one cell number "
            "per frustum point, from DepthLSSTransform.cells"
        )
    if max(cells.numel(), num_cells) >= 2**31:
        raise ValueError(f"{cells.numel()} points and {num_cells} cells: at most 2³¹ − 1 each")
    highest = int(cells.max()) if cells.numel() else -1
    if highest >= num_cells:
        raise ValueError(
            f"cells holds cell {highest} of a map of {num_cells} cells: it belongs to another "
            "configuration or batch size"
        )
    narrow = cells.detach().to(torch.int32).contiguous()
    kernels = numba_kernels() if cells.device.type == "cpu" else None
    sort_points = sort_points_torch if kernels is None else kernels.sort_points
    order, starts = sort_points(narrow, num_cells)
    work = starts + torch.arange(num_cells + 1, device=starts.device)
    targets = torch.arange(0, int(work[-1]), _BLOCK, device=starts.device)
    edges = {*torch.searchsorted(work, targets).tolist(), num_cells}
    return PoolPlan(narrow, order, starts, tuple(sorted(edges)))


@cache
def numba_kernels() -> ModuleType | None:
    """The CPU's kernels, where numba can compile."""
    try:
        from bevfusion.model.camera import _pool_numba
    except ImportError:
        return None
    return _pool_numba


def sort_points_torch(cells: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    """`order` and `starts` of a `PoolPlan`, on any device."""
    in_order, order = torch.sort(cells, stable=True)
    edges = torch.arange(num_cells + 1, device=cells.device, dtype=cells.dtype)
    starts = torch.searchsorted(in_order, edges)
    return order[int(starts[0]) :].to(torch.int32), starts - starts[0]


_plans: MutableMapping[Tensor, tuple[tuple[int, int], PoolPlan]] = WeakTensorKeyDictionary()


def as_plan(cells: Tensor | PoolPlan, num_cells: int) -> PoolPlan:
    """The plan of `cells`: itself, or remembered, or made now.

    Raises:
        ValueError: A plan for another number of cells; see `make_pool_plan` for tensors.
    """
    if isinstance(cells, PoolPlan):
        if cells.num_cells != num_cells:
            raise ValueError(
                f"the pool plan is for {cells.num_cells} cells, the map has {num_cells}: make the "
                "plan for this batch size"
            )
        return cells
    if cells.is_inference():  # such tensors do not tell whether they changed
        return make_pool_plan(cells, num_cells)
    key = (cells._version, num_cells)
    if cells in _plans:
        known, plan = _plans[cells]
        if known == key:
            return plan
    plan = make_pool_plan(cells, num_cells)
    _plans[cells] = (key, plan)
    return plan
