"""Which solids each column of rays, tile of a picture or patch of ground has to try.

Every list is a superset: an angle's or a corner's last bit decides nothing.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

_NEAR = 0.02  # nothing closer to the camera's plane is seen [m]
_kernel = numba.njit(cache=True, nogil=True, error_model="numpy")


@_kernel
def candidates_by_column(first: Any, last: Any, columns: int) -> Any:
    """Solids that a column of rays may hit, in the order given, as (starts, members).

    Args:
        first: first column of each solid; may be negative, columns wrap around.
        last: last column of each solid, not below `first`.
        columns: number of columns.
    """
    starts = np.zeros(columns + 1, np.int64)
    for s in range(first.shape[0]):
        for k in range(first[s], min(last[s], first[s] + columns - 1) + 1):
            starts[k % columns + 1] += 1
    for k in range(columns):
        starts[k + 1] += starts[k]
    fill = starts[:-1].copy()
    members = np.empty(starts[-1], np.int32)
    for s in range(first.shape[0]):
        for k in range(first[s], min(last[s], first[s] + columns - 1) + 1):
            members[fill[k % columns]] = s
            fill[k % columns] += 1
    return starts, members


@_kernel
def candidates_by_cell(rectangles: Any, across: int, down: int) -> Any:
    """Solids whose rectangle touches a cell, in the order given, as (starts, members).

    Args:
        rectangles: int64 [S, 4], first and last cell across, first and last down; empty where a
            last one is below its first. Cells beyond the grid are left out.
        across: cells in a row of the grid.
        down: rows.
    """
    starts = np.zeros(across * down + 1, np.int64)
    for s in range(rectangles.shape[0]):
        for j in range(max(rectangles[s, 2], 0), min(rectangles[s, 3], down - 1) + 1):
            for i in range(max(rectangles[s, 0], 0), min(rectangles[s, 1], across - 1) + 1):
                starts[j * across + i + 1] += 1
    for k in range(across * down):
        starts[k + 1] += starts[k]
    fill = starts[:-1].copy()
    members = np.empty(starts[-1], np.int32)
    for s in range(rectangles.shape[0]):
        for j in range(max(rectangles[s, 2], 0), min(rectangles[s, 3], down - 1) + 1):
            for i in range(max(rectangles[s, 0], 0), min(rectangles[s, 1], across - 1) + 1):
                members[fill[j * across + i]] = s
                fill[j * across + i] += 1
    return starts, members


@_kernel
def screen_rectangles(lens: Any, axes: Any, centre: Any, heading: Any, half: Any) -> Any:
    """Rectangle [pixels] around the picture of each solid's box, cut off before the camera.

    Args:
        lens: fx, fy, cx, cy [pixels].
        axes: [3, 3], the camera's right, down and forward in the world.
        centre: [S, 3] from the camera, in the world's directions.
        heading: [S, 2] cosine and sine.
        half: [S, 3] half sizes.

    Returns:
        float64 [S, 4]: left, right, top, bottom; left > right where all of it is behind.
    """
    out = np.empty((centre.shape[0], 4))
    corner = np.empty((8, 3))
    for s in range(centre.shape[0]):
        c, sn = heading[s, 0], heading[s, 1]
        for k in range(8):
            a = half[s, 0] if k & 1 else -half[s, 0]
            b = half[s, 1] if k & 2 else -half[s, 1]
            x, y = centre[s, 0] + a * c - b * sn, centre[s, 1] + a * sn + b * c
            z = centre[s, 2] + (half[s, 2] if k & 4 else -half[s, 2])
            for m in range(3):
                corner[k, m] = axes[m, 0] * x + axes[m, 1] * y + axes[m, 2] * z
        left, right, top, bottom = 1e9, -1e9, 1e9, -1e9
        for k in range(8):
            for bit in (0, 1, 2, 4):  # the corner itself, then its three edges to higher corners
                other = k | bit
                if bit and other == k:
                    continue
                d0, d1 = corner[k, 2] - _NEAR, corner[other, 2] - _NEAR
                if bit == 0:
                    if d0 < 0.0:
                        continue
                    part = 0.0
                elif (d0 < 0.0) == (d1 < 0.0):
                    continue
                else:
                    part = d0 / (d0 - d1)
                depth = max(corner[k, 2] + part * (corner[other, 2] - corner[k, 2]), 0.5 * _NEAR)
                u = corner[k, 0] + part * (corner[other, 0] - corner[k, 0])
                v = corner[k, 1] + part * (corner[other, 1] - corner[k, 1])
                u, v = lens[0] * u / depth + lens[2], lens[1] * v / depth + lens[3]
                left, right = min(left, u), max(right, u)
                top, bottom = min(top, v), max(bottom, v)
        out[s, 0], out[s, 1], out[s, 2], out[s, 3] = left, right, top, bottom
    return out
