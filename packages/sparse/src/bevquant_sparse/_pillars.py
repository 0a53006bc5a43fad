"""Sparse grids as pillars: a bit mask along the last axis for every line of voxels that has any.

A pillar is what lies over one (batch, y, x): a word of 64 bits and the rank of its first voxel, in
ascending order of the coordinates. The neighbours of a whole pillar are found at once, by walking
ascending lists side by side instead of looking voxels up in a table: memory grows with the voxels
and not with the grid, and every access is near the last one. A voxel's neighbours then follow from
shifts and bit counts.

Grids of one or two axes have leading axes of size 1. Kernels work on a range of pillars or rows
and write disjoint places, or run alone.
"""

from __future__ import annotations

import numpy as np
from numba import types

from bevquant_sparse._bitmap import _popcount
from bevquant_sparse.runtime.jit import compiled

WORD = 64  # longest last axis
_ONE, _Z_BITS = np.uint64(1), 6


@compiled("int64(int64[::1], int64, int64[::1], uint64[::1], int32[::1])")
def find_pillars(keys, depth, pillars, masks, starts):
    """Fill key without the last axis, mask and first rank of each pillar; returns their number.

    ``keys`` ascend strictly; ``starts`` gets one entry more.
    """
    count = 0
    last = -1
    for rank in range(keys.shape[0]):
        pillar = keys[rank] // depth
        bit = _ONE << types.uint64(keys[rank] - pillar * depth)
        if pillar != last:
            pillars[count] = pillar
            masks[count] = bit
            starts[count] = rank
            count += 1
            last = pillar
        else:
            masks[count - 1] |= bit
    starts[count] = keys.shape[0]
    return count


@compiled(
    "void(int64, int64, int64[::1], int64[::1], int64[::1], int64[::1], int64, int64,"
    " int32[:, ::1])"
)
def subm_lines(first, stop, pillars, row_starts, sizes, reach, width, step, lines):
    """Pillars that those of ``first … stop`` see: ``lines[pillar, i·width + j]``, −1 for none.

    ``row_starts`` gives the first pillar of each line of the second-last axis, ``reach`` the
    distances along the axis before it.
    """
    cursors = np.empty(reach.shape[0], np.int64)
    ends = np.empty(reach.shape[0], np.int64)
    half = (width // 2) * step
    current = -1
    for pillar in range(first, stop):
        row = pillars[pillar] // sizes[2]
        x = pillars[pillar] - row * sizes[2]
        y = row % sizes[1]
        if row != current:
            current = row
            for i in range(reach.shape[0]):
                inside = 0 <= y + reach[i] < sizes[1]
                cursors[i] = row_starts[row + reach[i]] if inside else 0
                ends[i] = row_starts[row + reach[i] + 1] if inside else 0
        for i in range(reach.shape[0]):
            base = (row + reach[i]) * sizes[2]
            cursor = cursors[i]
            while cursor < ends[i] and pillars[cursor] < base + x - half:
                cursor += 1
            cursors[i] = cursor
            for j in range(width):
                target = x - half + j * step
                found = -1
                if 0 <= target < sizes[2]:
                    while cursor < ends[i] and pillars[cursor] < base + target:
                        cursor += 1
                    if cursor < ends[i] and pillars[cursor] == base + target:
                        found = cursor
                lines[pillar, i * width + j] = found


@compiled(
    "void(int64, int64, int64[::1], uint64[::1], int64[::1], int64[::1], int64[::1],"
    " int64[:, ::1], int64[::1], int64[:, ::1], int64[::1], uint64[::1], int32[:, ::1])"
)
def list_outputs(
    first, stop, pillars, masks, row_starts, sizes, out_sizes, kernel, begins, counts,
    out_pillars, out_masks, lines,
):  # fmt: skip
    """Pillars that a strided convolution makes in lines ``first … stop`` of the output.

    ``kernel`` holds size, stride and padding of the three axes. A line's pillars, and the input
    pillars each of them sees, are written from ``begins[line]`` on; how many there are, and how
    many voxels, to ``counts[line + 1]``.
    """
    size1, stride1, padding1 = kernel[0, 0], kernel[0, 1], kernel[0, 2]
    size2, stride2, padding2 = kernel[1, 0], kernel[1, 1], kernel[1, 2]
    size3, stride3, padding3 = kernel[2, 0], kernel[2, 1], kernel[2, 2]
    pattern = (_ONE << types.uint64(size3)) - _ONE
    cursors = np.empty(size1, np.int64)
    ends = np.empty(size1, np.int64)
    bases = np.empty(size1, np.int64)
    found = np.empty(size1 * size2, np.int64)
    for line in range(first, stop):
        batch = line // out_sizes[1]
        origin = (line - batch * out_sizes[1]) * stride1 - padding1
        for i in range(size1):
            row = batch * sizes[1] + origin + i
            inside = 0 <= origin + i < sizes[1]
            cursors[i] = row_starts[row] if inside else 0
            ends[i] = row_starts[row + 1] if inside else 0
            bases[i] = row * sizes[2]
        place, num_voxels = begins[line], 0
        least = 0
        while True:
            x = out_sizes[2]  # of the next output that some pillar reaches
            for i in range(size1):
                cursor = cursors[i]
                while cursor < ends[i]:
                    seen = pillars[cursor] - bases[i]
                    candidate = max(least, -((size2 - 1 - padding2 - seen) // stride2))
                    if candidate * stride2 - padding2 <= seen:
                        x = min(x, candidate)
                        break
                    cursor += 1  # before the window, or between two
                cursors[i] = cursor
            if x >= out_sizes[2]:
                break
            start = x * stride2 - padding2
            union = types.uint64(0)
            for i in range(size1):
                cursor = cursors[i]
                for j in range(size2):
                    target = bases[i] + start + j
                    while cursor < ends[i] and pillars[cursor] < target:
                        cursor += 1
                    found[i * size2 + j] = -1
                    if cursor < ends[i] and pillars[cursor] == target:
                        found[i * size2 + j] = cursor
                        union |= masks[cursor]
            mask = types.uint64(0)
            for z in range(out_sizes[3]):
                shift = z * stride3 - padding3
                if shift >= 64:
                    break
                if shift >= 0:
                    window = union >> types.uint64(shift)
                else:
                    window = union << types.uint64(-shift)
                mask |= types.uint64((window & pattern) != 0) << types.uint64(z)
            if mask != 0:
                out_pillars[place] = line * out_sizes[2] + x
                out_masks[place] = mask
                for i in range(size1 * size2):
                    lines[place, i] = found[i]
                place += 1
                num_voxels += types.int64(_popcount(mask))
            least = x + 1
        counts[line + 1, 0], counts[line + 1, 1] = place - begins[line], num_voxels


@compiled(
    "void(int64, int64, int64[::1], int64[:, ::1], int64[::1], uint64[::1], int32[:, ::1],"
    " int64[::1], uint64[::1], int32[::1], int32[:, ::1])"
)
def close_gaps(
    first, stop, begins, counts, pillars, masks, lines,
    out_pillars, out_masks, out_starts, out_lines,
):  # fmt: skip
    """Join the results of `list_outputs` for lines ``first … stop``.

    ``counts`` is summed up: pillars and voxels before each line.
    """
    for line in range(first, stop):
        start, voxels = counts[line, 0], counts[line, 1]
        for i in range(counts[line + 1, 0] - start):
            source, place = begins[line] + i, start + i
            out_pillars[place], out_masks[place] = pillars[source], masks[source]
            out_starts[place] = voxels
            voxels += types.int64(_popcount(masks[source]))
            for j in range(lines.shape[1]):
                out_lines[place, j] = lines[source, j]


@compiled(
    "void(int64, int64, int64[::1], uint64[::1], int32[::1], uint64[::1], int32[:, ::1], int64,"
    " int64, int64, int64[::1], uint32[::1], uint32[::1], int32[:, ::1])"
)
def voxel_masks(
    first, stop, pillars, masks, starts, in_masks, lines, size, stride, padding, sizes,
    places, seen, indices,
):  # fmt: skip
    """Position and mask of neighbours of each voxel of pillars ``first … stop``.

    ``places`` gets pillar and height in one number. ``indices`` gets the coordinates if it has
    rows.
    """
    pattern = (_ONE << types.uint64(size)) - _ONE
    wanted = indices.shape[0] > 0
    for pillar in range(first, stop):
        left = masks[pillar]
        rank = starts[pillar]
        row = pillars[pillar] // sizes[2]
        batch = row // sizes[1]
        while left != 0:
            z = _popcount((left & (~left + _ONE)) - _ONE)
            left &= left - _ONE
            shift = types.int64(z) * stride - padding
            mask = types.uint64(0)
            for line in range(lines.shape[1]):
                other = lines[pillar, line]
                if other >= 0:
                    if shift >= 0:
                        bits = (in_masks[other] >> types.uint64(shift)) & pattern
                    else:
                        bits = (in_masks[other] << types.uint64(-shift)) & pattern
                    mask |= bits << types.uint64(line * size)
            places[rank] = types.uint32(pillar << _Z_BITS) | types.uint32(z)
            seen[rank] = types.uint32(mask)
            if wanted:
                indices[rank, 0] = batch
                indices[rank, 1] = row - batch * sizes[1]
                indices[rank, 2] = pillars[pillar] - row * sizes[2]
                indices[rank, 3] = z
            rank += 1
