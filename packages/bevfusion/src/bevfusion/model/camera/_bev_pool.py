"""Sums over the points of each cell of the bird's-eye view, with gradients.

Points are sorted by cell once per calibration. Every pooling uses this order.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from bevfusion.model.camera import _pool_torch
from bevfusion.model.camera._pool_torch import PoolPlan

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
    # A cell without points is work too: it is written.
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
    """The plan of `cells`: itself, or remembered, or made now."""
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


def bev_pool(features: Tensor, cells: Tensor | PoolPlan, num_cells: int) -> Tensor:
    """Sum the features of the points of each cell: out[c] = Σ_{p: cells[p] = c} features[p].

    The operation of mit-bevfusion's bev_pool. The sum runs over the points in ascending order, in
    float64, and is rounded once to the features' type. The result equals a float64 index_add bit
    for bit, at any number of threads and on any device.

    Args:
        features: float [points, channels].
        cells: int64 [points], negative outside; or its `PoolPlan`.
        num_cells: Cells of the map, all of the batch.

    Returns:
        float [num_cells, channels]; zero where no point lies.

    Raises:
        ValueError: Shapes, types or devices do not fit each other.

    Example:
        >>> bev_pool(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, -1, 1]), 2)
        tensor([[0.],
                [5.]])
    """
    plan = as_plan(cells, num_cells)
    if features.dim() != 2 or features.shape[0] != plan.cells.numel():
        raise ValueError(
            f"features is {list(features.shape)}: expected [{plan.cells.numel()}, channels], one "
            "row per entry of cells"
        )
    _check("features", features, plan)
    out: Tensor = _Pool.apply(features, plan)
    return out


def lift_splat_pool(
    depth: Tensor, context: Tensor, cells: Tensor | PoolPlan, num_cells: int
) -> Tensor:
    """Weigh each pixel's context by its depth distribution and sum by cell.

    out[cell] = Σ depth[i, d, h, w] · context[i, :, h, w] over the frustum points (i, d, h, w) in
    the cell: `bev_pool` of the outer product of depth and context, which is never in memory
    (638 MB for one nuScenes frame), neither forward nor backward. As exact as `bev_pool`.

    Args:
        depth: float [images, bins, height, width].
        context: float [images, channels, height, width].
        cells: int64 [images · bins · height · width], negative outside; or its `PoolPlan`.
        num_cells: Cells of the map, all of the batch.

    Returns:
        float [num_cells, channels]; zero where no point lies.

    Raises:
        ValueError: Shapes, types or devices do not fit each other.

    Example:
        >>> depth = torch.tensor([0.25, 0.75]).view(1, 2, 1, 1)
        >>> context = torch.tensor([4.0, 8.0, 12.0]).view(1, 3, 1, 1)
        >>> lift_splat_pool(depth, context, torch.tensor([0, 1]), 2)
        tensor([[1., 2., 3.],
                [3., 6., 9.]])
    """
    if torch.compiler.is_compiling() and isinstance(cells, Tensor):
        traced: Tensor = _operator(depth, context, cells, num_cells)
        return traced
    plan = as_plan(cells, num_cells)
    if (
        depth.dim() != 4
        or context.dim() != 4
        or (len(depth), *depth.shape[2:]) != (len(context), *context.shape[2:])
        or depth.numel() != plan.cells.numel()
    ):
        raise ValueError(
            f"depth is {list(depth.shape)}, context {list(context.shape)}, with "
            f"{plan.cells.numel()} cells: expected [images, bins, height, width], [images, "
            "channels, height, width] and images · bins · height · width cells"
        )
    if depth.dtype != context.dtype:
        raise ValueError(f"depth is {depth.dtype}, context {context.dtype}: give both one type")
    _check("depth", depth, plan)
    _check("context", context, plan)
    rows = context.permute(0, 2, 3, 1).reshape(-1, context.shape[1])
    out: Tensor = _LiftSplat.apply(depth, rows, plan)
    return out


@torch.library.custom_op("bevfusion::lift_splat_pool", mutates_args=())
def _operator(depth: Tensor, context: Tensor, cells: Tensor, num_cells: int) -> Tensor:
    """`lift_splat_pool` as one operator of a traced graph: its plan follows from the cells."""
    return lift_splat_pool(depth, context, cells, num_cells)


@_operator.register_fake
def _(depth: Tensor, context: Tensor, cells: Tensor, num_cells: int) -> Tensor:
    return depth.new_empty(num_cells, context.shape[1])


def _check(name: str, tensor: Tensor, plan: PoolPlan) -> None:
    if not tensor.is_floating_point() or tensor.device != plan.cells.device:
        raise ValueError(
            f"{name} is {tensor.dtype} on {tensor.device}: expected floating point on "
            f"{plan.cells.device}, where the cells are"
        )


def _backend(tensor: Tensor) -> ModuleType:
    fits = tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)
    return (numba_kernels() if fits else None) or _pool_torch


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, plan: PoolPlan) -> Tensor:
        ctx.plan = plan
        out: Tensor = _backend(features).pool(features, plan)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cells, outside = ctx.plan.cells, ctx.plan.num_cells
        # A row of zeros for points outside of the map.
        padded = torch.cat([grad, grad.new_zeros(1, grad.shape[1])])
        return padded[torch.where(cells < 0, outside, cells)], None


class _LiftSplat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, depth: Tensor, rows: Tensor, plan: PoolPlan) -> Tensor:
        ctx.save_for_backward(depth, rows)
        ctx.plan = plan
        out: Tensor = _backend(depth).lift(depth, rows, plan)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        depth, rows = ctx.saved_tensors
        to_depth, to_rows = _backend(depth).lift_backward(grad, depth, rows, ctx.plan)
        return to_depth, to_rows, None
