"""One bit per voxel of the grid, and the rank of each set bit: the numba kernels of rulebooks.

All grids are taken to four axes (leading axes of size 1). A bit's number is the linear key of its
voxel. Words and ranks alternate, so that one cache line holds both: ``cells[2w]`` is the word of
bits ``64w … 64w + 63``, ``cells[2w + 1]`` the number of set bits before it, defined where the word
has a set bit. Kernels either write disjoint rows, and then take a range of rows, or run alone.
Rows come in ascending order, so that neighbours in space are neighbours in memory; ``names`` and
``order`` give their places in the input. Indices are unsigned where speed counts: numba tests
signed ones for being negative.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from bevquant_sparse.runtime.jit import compiled

# What `linear_keys` returns, beside the first offending row.
FINE, OUT_OF_RANGE, UNSORTED = 0, 1, 2
_ONE, _TWO, _THREE, _SIX = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(6)
_SIXTY_ONE, _LOW, _SIXTY_FOUR = np.uint64(61), np.uint64(63), np.uint64(64)


@compiled("uint64(uint64)")
def gray_rank(mask):
    """Rank of a mask of up to 32 bits in the Gray code: how many masks come before it."""
    for shift in (1, 2, 4, 8, 16):
        mask ^= mask >> types.uint64(shift)
    return mask


@compiled("int64(int32[:, ::1], int64[::1], int64[::1])")
def linear_keys(indices, sizes, keys):
    """Fill ``keys``; returns ``4 · row + OUT_OF_RANGE``, ``UNSORTED`` or ``FINE``."""
    previous = -1
    ascending = True
    for row in range(indices.shape[0]):
        key = 0
        for column in range(indices.shape[1]):
            value = indices[row, column]
            if value < 0 or value >= sizes[column]:
                return 4 * row + OUT_OF_RANGE
            key = key * sizes[column] + value
        keys[row] = key
        ascending = ascending and key > previous
        previous = key
    return FINE if ascending else UNSORTED


@compiled("void(int64[::1], uint64[::1])")
def mark_rows(keys, cells):
    """Set the bits of ascending keys. Ranks come for free: a row's rank is its number."""
    for row in range(keys.shape[0]):
        cell = (types.uint64(keys[row]) >> _SIX) << _ONE
        if cells[cell] == 0:
            cells[cell + _ONE] = row
        cells[cell] |= _ONE << (types.uint64(keys[row]) & _LOW)


@compiled("void(int64[::1], uint64[::1])")
def clear_rows(keys, cells):
    """Zero the words of these keys."""
    for row in range(keys.shape[0]):
        cells[(types.uint64(keys[row]) >> _SIX) << _ONE] = 0


def _emit_popcount(typingctx: Any, word: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


def _emit_prefetch(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        int32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, int32, int32, int32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [pointer, int32(1), int32(3), int32(1)])  # to write, keep, data
        return context.get_dummy_value()

    return types.void(types.uint64), generate


# numba has no names for these instructions.
_popcount = intrinsic(_emit_popcount)
_prefetch = intrinsic(_emit_prefetch)


@compiled(
    "void(int64, int64, int32[:, ::1], int64[::1], int64[:, ::1], int64, int64, uint64[::1],"
    " int32[::1], int32[:, ::1])"
)
def find_neighbours(start, stop, indices, sizes, lines, width, step, cells, names, neighbours):
    """The rows of a SubM table whose ranks are ``start … stop``.

    ``lines`` lists the offsets of all axes but the last, whose ``width`` offsets are ``step``
    apart. ``names`` gives the input row of each rank.
    """
    reach = (width // 2) * step
    for number in range(start, stop):
        row = names[number]
        b = indices[number, 0]
        y0, y1, y2 = indices[number, 1], indices[number, 2], indices[number, 3]
        low = indices[number, 4] - reach
        for line in range(lines.shape[0]):
            x0, x1, x2 = y0 + lines[line, 0], y1 + lines[line, 1], y2 + lines[line, 2]
            inside = 0 <= x0 < sizes[1] and 0 <= x1 < sizes[2] and 0 <= x2 < sizes[3]
            origin = (((b * sizes[1] + x0) * sizes[2] + x1) * sizes[3] + x2) * sizes[4]
            for j in range(width):
                z = low + j * step
                neighbour = types.int32(-1)
                if inside and 0 <= z < sizes[4]:
                    bit = types.uint64(origin + z)
                    cell, shift = (bit >> _SIX) << _ONE, bit & _LOW
                    if (cells[cell] >> shift) & _ONE:
                        below = cells[cell] & ((_ONE << shift) - _ONE)
                        neighbour = names[cells[cell + _ONE] + _popcount(below)]
                neighbours[row, line * width + j] = neighbour


@compiled(
    "void(int64, int64, int32[:, ::1], int64[::1], int64[:, ::1], uint64[::1], int32[::1],"
    " int32[:, ::1])"
)
def find_neighbours_3(start, stop, indices, sizes, lines, cells, names, neighbours):
    """``find_neighbours`` for a width of 3 and a step of 1, the kernel nearly every network has."""
    count = lines.shape[0]
    deltas = np.empty(count, np.int64)
    # ``cells`` begins with a spare word of 64 bits for the neighbour before the first voxel;
    # ``names`` has one entry more, read where the last bit of a line is absent.
    for line in range(count):
        delta = lines[line, 0] * sizes[2] + lines[line, 1]
        deltas[line] = (delta * sizes[3] + lines[line, 2]) * sizes[4] - 1 + 64
    reach0, reach1, reach2 = -lines[0, 0], -lines[0, 1], -lines[0, 2]
    absent = types.int32(-1)
    table = types.uint64(neighbours.ctypes.data)
    line_bytes = types.uint64(neighbours.shape[1] * 4)
    # The three bits of a line come from one or two words at once, and their rows are chosen without
    # branches, whose pattern could not be predicted.
    for number in range(start, stop):
        row = types.uint64(names[number])
        ahead = table + types.uint64(names[min(number + 8, stop - 1)]) * line_bytes
        _prefetch(ahead)
        _prefetch(ahead + _SIXTY_FOUR)
        b, y0, y1 = indices[number, 0], indices[number, 1], indices[number, 2]
        y2, z = indices[number, 3], indices[number, 4]
        own = (((b * sizes[1] + y0) * sizes[2] + y1) * sizes[3] + y2) * sizes[4] + z
        interior = (
            reach0 <= y0 < sizes[1] - reach0
            and reach1 <= y1 < sizes[2] - reach1
            and reach2 <= y2 < sizes[3] - reach2
        )
        # Bits of the line that lie in the grid: at its ends the neighbour belongs to another line.
        allowed = types.uint64(7)
        if z == 0:
            allowed = types.uint64(6)
        if z == sizes[4] - 1:
            allowed &= types.uint64(3)
        place = types.uint64(0)
        for line in range(count):
            found = types.uint64(0)
            if interior or (
                0 <= y0 + lines[line, 0] < sizes[1]
                and 0 <= y1 + lines[line, 1] < sizes[2]
                and 0 <= y2 + lines[line, 2] < sizes[3]
            ):
                bit = types.uint64(own + deltas[line])
                cell, shift = (bit >> _SIX) << _ONE, bit & _LOW
                word = cells[cell]
                found = word >> shift
                rank = cells[cell + _ONE] + _popcount(word & ((_ONE << shift) - _ONE))
                if shift > _SIXTY_ONE:
                    if found == 0:
                        rank = cells[cell + _THREE]
                    found |= cells[cell + _TWO] << (_SIXTY_FOUR - shift)
                # A bit before the allowed ones still counts in the rank.
                rank += found & ~allowed & _ONE
                found &= allowed
            if found == 0:
                neighbours[row, place] = absent
                neighbours[row, place + _ONE] = absent
                neighbours[row, place + _TWO] = absent
            else:
                first, second = found & _ONE, (found >> _ONE) & _ONE
                neighbours[row, place] = names[rank] if first else absent
                rank += first
                neighbours[row, place + _ONE] = names[rank] if second else absent
                rank += second
                neighbours[row, place + _TWO] = names[rank] if found >> _TWO else absent
            place += _THREE


@compiled("void(int32[:, ::1], int64, int32[:, ::1], int64[:, :, ::1], uint64[::1])")
def mark_outputs(indices, out_volume, counts, out_keys, cells):
    """Set the bit of every output that some input reaches.

    ``counts[axis, coordinate]`` candidates along each axis add ``out_keys`` to the output's key.
    """
    for row in range(indices.shape[0]):
        b = indices[row, 0] * out_volume
        y0, y1, y2, y3 = indices[row, 1], indices[row, 2], indices[row, 3], indices[row, 4]
        for i0 in range(counts[0, y0]):
            k0 = b + out_keys[0, y0, i0]
            for i1 in range(counts[1, y1]):
                k1 = k0 + out_keys[1, y1, i1]
                for i2 in range(counts[2, y2]):
                    k2 = k1 + out_keys[2, y2, i2]
                    for i3 in range(counts[3, y3]):
                        bit = types.uint64(k2 + out_keys[3, y3, i3])
                        cells[(bit >> _SIX) << _ONE] |= _ONE << (bit & _LOW)


@compiled("int64(int64, uint64[::1])")
def rank_words(count, cells):
    """Fill the ranks; returns the number of set bits."""
    total = types.uint64(0)
    for word in range(count):
        cells[2 * word + 1] = total
        total += _popcount(cells[2 * word])
    return types.int64(total)


@compiled("void(int64, int64, int64[::1], uint64[::1], int32[:, ::1])")
def list_outputs(start, stop, out_shape, cells, out_indices):
    """Coordinates of the set bits of words ``start … stop``, ascending."""
    last = out_indices.shape[1] - 1
    for word in range(start, stop):
        row = cells[2 * word + 1]
        left = cells[2 * word]
        while left != 0:
            bit = types.uint64(word * 64) + _popcount((left & (~left + _ONE)) - _ONE)
            for column in range(last, 0, -1):
                size = types.uint64(out_shape[column - 1])
                quotient = bit // size
                out_indices[row, column] = types.int32(bit - quotient * size)
                bit = quotient
            out_indices[row, 0] = types.int32(bit)
            row += _ONE
            left &= left - _ONE


@compiled(
    "void(int64, int64, int32[:, ::1], int64, int32[::1], int32[:, ::1], int64[:, :, ::1],"
    " int32[:, :, ::1], uint64[::1], int32[:, ::1])"
)
def scatter_inputs(
    start, stop, indices, out_volume, order, counts, out_keys, offsets, cells, neighbours
):
    """Write rows ``order[start … stop]`` into the table of the outputs they reach."""
    for number in range(start, stop):
        row = order[number]
        b, y0, y1 = indices[number, 0] * out_volume, indices[number, 1], indices[number, 2]
        y2, y3 = indices[number, 3], indices[number, 4]
        for i0 in range(counts[0, y0]):
            k0, o0 = b + out_keys[0, y0, i0], offsets[0, y0, i0]
            for i1 in range(counts[1, y1]):
                k1, o1 = k0 + out_keys[1, y1, i1], o0 + offsets[1, y1, i1]
                for i2 in range(counts[2, y2]):
                    k2, o2 = k1 + out_keys[2, y2, i2], o1 + offsets[2, y2, i2]
                    for i3 in range(counts[3, y3]):
                        bit = types.uint64(k2 + out_keys[3, y3, i3])
                        cell, shift = (bit >> _SIX) << _ONE, bit & _LOW
                        below = cells[cell] & ((_ONE << shift) - _ONE)
                        out_row = cells[cell + _ONE] + _popcount(below)
                        neighbours[out_row, types.uint64(o2 + offsets[3, y3, i3])] = row
