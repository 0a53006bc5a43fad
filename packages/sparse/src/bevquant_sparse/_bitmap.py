"""One bit per voxel of the grid, and the rank of each set bit: the numba kernels of rulebooks.

All grids are taken to four axes (leading axes of size 1). A bit's number is the linear key of its
voxel. ``ranks[w]`` is the number of set bits before word ``w``; it is defined where the word has
a set bit. Kernels either write disjoint rows, and then take a range of rows, or run alone.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from bevquant_sparse._jit import compiled

# What `mark_rows` and `mark_outputs` return beside the first offending row.
FINE, OUT_OF_RANGE, UNSORTED = 0, 1, 2


@intrinsic
def _popcount(typingctx: Any, word: Any) -> Any:  # numba has no name for the instruction
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), generate


@compiled("int64(int32[:, ::1], int64[::1], int64[::1], uint64[::1], int32[::1])")
def mark_rows(indices, sizes, keys, words, ranks):  # type: ignore[no-untyped-def]
    """Set every row's bit while the rows ascend; returns ``4 · row + problem`` or 0.

    Fills ``keys``. Ranks come for free: in ascending order a row's rank is its number.
    """
    rows, columns = indices.shape
    previous = -1
    ascending = True
    for row in range(rows):
        key = 0
        for column in range(columns):
            value = indices[row, column]
            if value < 0 or value >= sizes[column]:
                return 4 * row + OUT_OF_RANGE
            key = key * sizes[column] + value
        keys[row] = key
        ascending = ascending and key > previous
        previous = key
        if ascending:
            word = key >> 6
            if words[word] == 0:
                ranks[word] = row
            words[word] |= types.uint64(1) << types.uint64(key & 63)
    return FINE if ascending else UNSORTED


@compiled("int64(int64[::1], uint64[::1], int32[::1])")
def mark_sorted(keys, words, ranks):  # type: ignore[no-untyped-def]
    """Set the bits of sorted keys; returns the place of the first repeated key or −1."""
    for row in range(keys.shape[0]):
        word = keys[row] >> 6
        bit = types.uint64(1) << types.uint64(keys[row] & 63)
        if words[word] & bit:
            return row
        if words[word] == 0:
            ranks[word] = row
        words[word] |= bit
    return -1


@compiled("void(int64[::1], uint64[::1])")
def clear_keys(keys, words):  # type: ignore[no-untyped-def]
    """Zero the words of these keys."""
    for row in range(keys.shape[0]):
        words[keys[row] >> 6] = 0


@compiled(
    "void(int64, int64, int32[:, ::1], int64[::1], int64[:, ::1], int64, int64, uint64[::1],"
    " int32[::1], int32[::1], int32[:, ::1])"
)
def find_neighbours(  # type: ignore[no-untyped-def]
    start, stop, indices, sizes, lines, reach, step, words, ranks, names, neighbours
):
    """Rows ``start … stop`` of a SubM table.

    ``lines`` lists the offsets of all axes but the last, whose offsets are ``step`` apart,
    from ``−reach`` to ``reach``. ``names`` gives the input row of each rank; empty: the rank.
    """
    last = sizes[4]
    width = 2 * (reach // step) + 1
    renamed = names.shape[0] > 0
    for row in range(start, stop):
        b = indices[row, 0]
        y0, y1, y2 = indices[row, 1], indices[row, 2], indices[row, 3]
        low = indices[row, 4] - reach
        for line in range(lines.shape[0]):
            x0, x1, x2 = y0 + lines[line, 0], y1 + lines[line, 1], y2 + lines[line, 2]
            place = line * width
            for j in range(width):
                neighbours[row, place + j] = -1
            if x0 < 0 or x0 >= sizes[1] or x1 < 0 or x1 >= sizes[2] or x2 < 0 or x2 >= sizes[3]:
                continue
            origin = (((b * sizes[1] + x0) * sizes[2] + x1) * sizes[3] + x2) * last
            if step == 1 and width <= 32:
                # The whole line is a run of bits within two words.
                cut = max(0, -low)
                length = min(width, last - low) - cut
                bit = origin + low + cut
                word, shift = bit >> 6, types.uint64(bit & 63)
                found = words[word] >> shift
                rank = ranks[word]
                if found == 0:
                    rank = ranks[word + 1]
                else:
                    below = (types.uint64(1) << shift) - types.uint64(1)
                    rank += types.int32(_popcount(words[word] & below))
                if shift != 0:
                    found |= words[word + 1] << (types.uint64(64) - shift)
                found &= (types.uint64(1) << types.uint64(length)) - types.uint64(1)
                place += cut
                while found != 0:
                    if found & types.uint64(1):
                        neighbours[row, place] = names[rank] if renamed else rank
                        rank += 1
                    place += 1
                    found >>= types.uint64(1)
            else:
                for j in range(width):
                    z = low + j * step
                    if z < 0 or z >= last:
                        continue
                    word, shift = (origin + z) >> 6, types.uint64((origin + z) & 63)
                    if (words[word] >> shift) & types.uint64(1):
                        below = (types.uint64(1) << shift) - types.uint64(1)
                        rank = ranks[word] + types.int32(_popcount(words[word] & below))
                        neighbours[row, place + j] = names[rank] if renamed else rank


@compiled(
    "int64(int32[:, ::1], int64[::1], int64, int64[::1], int32[:, ::1], int64[:, :, ::1],"
    " uint64[::1])"
)
def mark_outputs(indices, sizes, out_volume, keys, counts, out_keys, words):  # type: ignore[no-untyped-def]
    """Set the bit of every output that some input reaches; returns as ``mark_rows``.

    ``counts[axis, coordinate]`` candidates along each axis add ``out_keys`` to the output's key.
    """
    rows = indices.shape[0]
    previous = -1
    ascending = True
    for row in range(rows):
        key = 0
        for column in range(5):
            value = indices[row, column]
            if value < 0 or value >= sizes[column]:
                return 4 * row + OUT_OF_RANGE
            key = key * sizes[column] + value
        keys[row] = key
        ascending = ascending and key > previous
        previous = key
        b = indices[row, 0] * out_volume
        y0, y1, y2, y3 = indices[row, 1], indices[row, 2], indices[row, 3], indices[row, 4]
        for i0 in range(counts[0, y0]):
            k0 = b + out_keys[0, y0, i0]
            for i1 in range(counts[1, y1]):
                k1 = k0 + out_keys[1, y1, i1]
                for i2 in range(counts[2, y2]):
                    k2 = k1 + out_keys[2, y2, i2]
                    for i3 in range(counts[3, y3]):
                        bit = k2 + out_keys[3, y3, i3]
                        words[bit >> 6] |= types.uint64(1) << types.uint64(bit & 63)
    return FINE if ascending else UNSORTED


@compiled("int64(int64, uint64[::1], int32[::1])")
def rank_words(count, words, ranks):  # type: ignore[no-untyped-def]
    """Number of set bits before each word; returns their total."""
    total = 0
    for word in range(count):
        ranks[word] = total
        total += types.int64(_popcount(words[word]))
    return total


@compiled("void(int64, int64, int64[::1], uint64[::1], int32[::1], int32[:, ::1])")
def list_outputs(start, stop, out_sizes, words, ranks, out_indices):  # type: ignore[no-untyped-def]
    """Coordinates of the set bits of words ``start … stop``, ascending."""
    last = out_indices.shape[1] - 1
    for word in range(start, stop):
        row = ranks[word]
        left = words[word]
        while left != 0:
            lowest = left & (~left + types.uint64(1))
            bit = types.uint64(word * 64) + _popcount(lowest - types.uint64(1))
            for column in range(last, 0, -1):
                size = types.uint64(out_sizes[column])
                quotient = bit // size
                out_indices[row, column] = types.int32(bit - quotient * size)
                bit = quotient
            out_indices[row, 0] = types.int32(bit)
            row += 1
            left ^= lowest


@compiled(
    "void(int64, int64, int32[:, ::1], int64, int32[:, ::1], int64[:, :, ::1], int32[:, :, ::1],"
    " uint64[::1], int32[::1], int32[:, ::1])"
)
def scatter_inputs(  # type: ignore[no-untyped-def]
    start, stop, indices, out_volume, counts, out_keys, offsets, words, ranks, neighbours
):
    """Write rows ``start … stop`` into the table of the outputs they reach."""
    for row in range(start, stop):
        b = indices[row, 0] * out_volume
        y0, y1, y2, y3 = indices[row, 1], indices[row, 2], indices[row, 3], indices[row, 4]
        for i0 in range(counts[0, y0]):
            k0, o0 = b + out_keys[0, y0, i0], offsets[0, y0, i0]
            for i1 in range(counts[1, y1]):
                k1, o1 = k0 + out_keys[1, y1, i1], o0 + offsets[1, y1, i1]
                for i2 in range(counts[2, y2]):
                    k2, o2 = k1 + out_keys[2, y2, i2], o1 + offsets[2, y2, i2]
                    for i3 in range(counts[3, y3]):
                        bit = k2 + out_keys[3, y3, i3]
                        word, shift = bit >> 6, types.uint64(bit & 63)
                        below = (types.uint64(1) << shift) - types.uint64(1)
                        out_row = ranks[word] + types.int32(_popcount(words[word] & below))
                        neighbours[out_row, o2 + offsets[3, y3, i3]] = row
