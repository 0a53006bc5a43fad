"""The voxelizer's inner loop: points to cells through an open-addressing hash table."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

# 2^64 / golden ratio: consecutive cells land far apart in the table (Fibonacci hashing).
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@numba.njit(cache=True, boundscheck=False)
def assign_voxels(
    points: Any, low: Any, size: Any, grid: Any, table_bits: int
) -> tuple[Any, Any, int]:
    """Number of the voxel of each point (-1: out of range), and the voxels' cells.

    The cell is floor((p - low) / size), every step rounded to float32 as upstream does, dropped
    where it is below 0 or not below the grid. Voxels are numbered in the order of their first
    point.

    Args:
        points: float32 [points, columns].
        low: float32 [3], lower corner of the range.
        size: float32 [3], edges of a voxel.
        grid: int64 [3], cells along x, y, z.
        table_bits: the hash table has 2^table_bits slots, more than there are points.
    """
    count = points.shape[0]
    voxel_of = np.empty(count, np.int32)
    cells = np.empty((count, 3), np.int32)
    keys = np.full(1 << table_bits, -1, np.int64)
    numbers = np.empty(1 << table_bits, np.int32)
    mask = np.int64((1 << table_bits) - 1)
    shift = np.uint64(64 - table_bits)
    voxels = 0
    for row in range(count):
        x = np.floor(np.float32(np.float32(points[row, 0] - low[0]) / size[0]))
        y = np.floor(np.float32(np.float32(points[row, 1] - low[1]) / size[1]))
        z = np.floor(np.float32(np.float32(points[row, 2] - low[2]) / size[2]))
        inside = x >= 0 and x < grid[0] and y >= 0 and y < grid[1] and z >= 0 and z < grid[2]
        if not inside:
            voxel_of[row] = -1
            continue
        ix, iy, iz = np.int64(x), np.int64(y), np.int64(z)
        key = (ix * grid[1] + iy) * grid[2] + iz
        slot = np.int64((np.uint64(key) * _MULTIPLIER) >> shift)
        while keys[slot] != -1 and keys[slot] != key:
            slot = (slot + 1) & mask
        if keys[slot] == -1:
            keys[slot] = key
            numbers[slot] = voxels
            cells[voxels, 0] = ix
            cells[voxels, 1] = iy
            cells[voxels, 2] = iz
            voxels += 1
        voxel_of[row] = numbers[slot]
    return voxel_of, cells[:voxels].copy(), voxels


@numba.njit(cache=True, boundscheck=False)
def mean_features(
    points: Any, voxel_of: Any, voxels: int, max_num_points: int
) -> tuple[Any, Any, int]:
    """Mean of each voxel's first points, summed in float64 in the order of the rows.

    Returns the means float32 [voxels, columns], the points in each mean int32 [voxels], and how
    many points a full voxel turned away.
    """
    columns = points.shape[1]
    sums = np.zeros((voxels, columns), np.float64)
    used = np.zeros(voxels, np.int32)
    turned_away = 0
    for row in range(points.shape[0]):
        voxel = voxel_of[row]
        if voxel < 0 or voxel >= voxels:
            continue
        if used[voxel] >= max_num_points:
            turned_away += 1
            continue
        used[voxel] += 1
        for column in range(columns):
            sums[voxel, column] += points[row, column]
    means = np.empty((voxels, columns), np.float32)
    for voxel in range(voxels):
        for column in range(columns):
            means[voxel, column] = np.float32(sums[voxel, column] / used[voxel])
    return means, used, turned_away
