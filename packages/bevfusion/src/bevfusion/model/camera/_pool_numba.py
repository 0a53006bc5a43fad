"""BEV pooling on a CPU: kernels that hold no lock, on as many threads as torch uses.

float32 values are summed in float64 and rounded once: products of two float32 are exact there, so
that the result does not depend on the instruction set either. All kernels stand in one module
because numba's cache notices changes to the file of the outermost one alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from bevfusion.model.camera._pool_torch import PoolPlan
from bevquant_sparse.runtime.threads import share  # ImportError with NUMBA_DISABLE_JIT

_LANES = 16
_COLUMNS = 8  # of the feature map in one task of the backward pass: its sums stay in the cache


def sort_points(cells: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    """`order` and `starts` of a `PoolPlan`: a counting sort of int32 [points]."""
    starts = torch.zeros(num_cells + 1, dtype=torch.int64)
    order = torch.empty(int((cells >= 0).sum()), dtype=torch.int32)
    _sort(cells.numpy(), starts.numpy(), order.numpy())
    return order, starts


def pool(features: Tensor, plan: PoolPlan) -> Tensor:
    """Σ features[p] over the points p of each cell: [points, channels] → [cells, channels]."""
    rows = features.detach().contiguous()
    out = rows.new_empty(plan.num_cells, rows.shape[1])
    args = (plan.starts.numpy(), plan.order.numpy(), rows.numpy(), out.numpy())
    edges = list(pairwise(plan.blocks))
    share(lambda i: _pool(*edges[i], *args), len(edges))
    return out


def lift(depth: Tensor, rows: Tensor, plan: PoolPlan) -> Tensor:
    """Σ depth[p] · rows[pixel of p] over the points p of each cell, numbered in depth's order."""
    weights, context = depth.detach().contiguous(), rows.detach().contiguous()
    out = context.new_empty(plan.num_cells, context.shape[1])
    pixels = plan.pixels(depth.shape[1], depth.shape[2] * depth.shape[3])
    points = (plan.starts.numpy(), plan.order.numpy(), pixels.numpy())
    values = (weights.view(-1).numpy(), context.numpy(), out.numpy())
    edges = list(pairwise(plan.blocks))
    share(lambda i: _lift(*edges[i], *points, *values), len(edges))
    return out


def lift_backward(
    grad: Tensor, depth: Tensor, rows: Tensor, plan: PoolPlan
) -> tuple[Tensor, Tensor]:
    """Gradients of `depth` and `rows`, given that of the output, [cells, channels]."""
    weights, context = depth.detach().contiguous(), rows.detach().contiguous()
    grad_depth, grad_rows = torch.empty_like(weights), torch.empty_like(context)
    images, _, height, width = depth.shape
    arrays = (
        plan.cells.view(depth.shape).numpy(),
        weights.numpy(),
        context.view(images, height, width, -1).numpy(),
        grad.detach().contiguous().numpy(),
        grad_depth.numpy(),
        grad_rows.view(images, height, width, -1).numpy(),
    )
    # Every pixel sums over its bins in their order, whatever the number of threads.
    tasks = [(i, first) for i in range(images) for first in range(0, width, _COLUMNS)]
    share(lambda t: _lift_backward(*tasks[t], *arrays), len(tasks))
    return grad_depth, grad_rows


@numba.njit(nogil=True, cache=True)
def _sort(cells: Any, starts: Any, order: Any) -> None:
    for p in range(cells.size):
        if cells[p] >= 0:
            starts[cells[p] + 1] += 1
    for cell in range(starts.size - 1):
        starts[cell + 1] += starts[cell]
    free = starts.copy()
    for p in range(cells.size):
        if cells[p] >= 0:
            order[free[cells[p]]] = p
            free[cells[p]] += 1


@numba.njit(nogil=True, cache=True)
def _pool(first: int, stop: int, starts: Any, order: Any, rows: Any, out: Any) -> None:
    total = np.empty(rows.shape[1], np.float64)
    for cell in range(first, stop):
        total[:] = 0.0
        for k in range(starts[cell], starts[cell + 1]):
            row = rows[order[k]]
            for c in range(total.size):
                total[c] += np.float64(row[c])
        for c in range(total.size):
            out[cell, c] = total[c]


@numba.njit(nogil=True, cache=True)
def _lift(
    first: int, stop: int, starts: Any, order: Any, pixels: Any, depth: Any, rows: Any, out: Any
) -> None:
    total = np.empty(rows.shape[1], np.float64)
    for cell in range(first, stop):
        total[:] = 0.0
        for k in range(starts[cell], starts[cell + 1]):
            weight = np.float64(depth[order[k]])
            row = rows[pixels[k]]
            for c in range(total.size):
                total[c] += weight * np.float64(row[c])
        for c in range(total.size):
            out[cell, c] = total[c]


@numba.njit(nogil=True, cache=True)
def _sum(products: Any, lanes: Any) -> float:
    """Sixteen sums side by side: vector instructions, and the order of each sum is fixed."""
    for i in range(_LANES):
        lanes[i] = products[i]
    for block in range(_LANES, products.size, _LANES):
        for i in range(_LANES):
            lanes[i] += products[block + i]
    a = (lanes[0] + lanes[8]) + (lanes[4] + lanes[12])
    b = (lanes[1] + lanes[9]) + (lanes[5] + lanes[13])
    c = (lanes[2] + lanes[10]) + (lanes[6] + lanes[14])
    d = (lanes[3] + lanes[11]) + (lanes[7] + lanes[15])
    total: float = (a + c) + (b + d)
    return total


@numba.njit(nogil=True, cache=True)
def _lift_backward(
    image: int,
    first: int,
    cells: Any,
    depth: Any,
    rows: Any,
    grad: Any,
    to_depth: Any,
    to_rows: Any,
) -> None:
    bins, height, channels = cells.shape[1], cells.shape[2], rows.shape[3]
    stop = min(first + _COLUMNS, cells.shape[3])
    totals = np.zeros((height, stop - first, channels), np.float64)
    products = np.zeros(-(-channels // _LANES) * _LANES, np.float64)
    lanes = np.empty(_LANES, np.float64)
    for d in range(bins):
        # A column of pixels looks at few cells, which stay in the cache.
        for h in range(height):
            for w in range(first, stop):
                cell = cells[image, d, h, w]
                if cell < 0:
                    to_depth[image, d, h, w] = 0.0
                    continue
                slope = grad[cell]
                row = rows[image, h, w]
                total = totals[h, w - first]
                weight = np.float64(depth[image, d, h, w])
                for c in range(channels):
                    g = np.float64(slope[c])
                    total[c] += weight * g
                    products[c] = g * np.float64(row[c])
                to_depth[image, d, h, w] = _sum(products, lanes)
    for h in range(height):
        for w in range(first, stop):
            for c in range(channels):
                to_rows[image, h, w, c] = totals[h, w - first, c]
