"""Tiles of a plan straight from pillars, without a table of neighbours between."""

from __future__ import annotations

import numpy as np
from numba import types

from bevquant_sparse._bitmap import _popcount, gray_rank
from bevquant_sparse.runtime.jit import compiled

_Z_BITS, _Z_MASK = 6, 63


@compiled("void(int64, int64, uint32[::1], int64[::1])")
def sort_keys(first, stop, seen, keys):
    """Rank of each voxel's mask in the Gray code, then its number."""
    for rank in range(first, stop):
        code = gray_rank(types.uint64(seen[rank]))
        keys[rank] = types.int64((code << types.uint64(31)) | types.uint64(rank))


@compiled("void(int64, int64, int64[::1], uint32[::1], int64, int32[::1])")
def count_entries(first, stop, keys, seen, tile_rows, bounds):
    """Number of offsets that tiles ``first … stop`` have."""
    for tile in range(first, stop):
        union = types.uint32(0)
        for r in range(tile * tile_rows, min((tile + 1) * tile_rows, keys.shape[0])):
            union |= seen[keys[r] & 0x7FFFFFFF]
        bounds[tile + 1] = _popcount(types.uint64(union))


@compiled(
    "void(int64, int64, int64[::1], uint32[::1], uint32[::1], int32[:, ::1], uint64[::1],"
    " int32[::1], int32[::1], int32[::1], int64, int64, int64, int64, int32[::1], int32[::1],"
    " int32[:, ::1], int32[::1])"
)
def fill_entries(
    first, stop, keys, seen, places, lines, masks, starts, names, out_names, size, stride, padding,
    tile_rows, bounds, offsets, rows, out_rows,
):  # fmt: skip
    """The entries of tiles ``first … stop``: offsets in order, and each row's input under them.

    ``names`` and ``out_names`` give the rows of ranks; empty where these are the same. A row's
    inputs are found for every line that the tile sees, in a block of their own, and those of the
    tile's offsets copied: no branch depends on a single voxel, whose pattern nobody could predict.
    Indices are unsigned, because numba tests signed ones for being negative.
    """
    zero, one, two, step = types.uint64(0), types.uint64(1), types.uint64(2), types.uint64(size)
    absent = types.int32(-1)
    pattern = (one << step) - one
    width = types.uint64(tile_rows)
    voxels = types.uint64(keys.shape[0])
    num_lines = types.uint64(lines.shape[1])
    present = np.empty(lines.shape[1], np.uint64)  # lines that some row of the tile sees
    chosen = np.empty(lines.shape[1] * size, np.uint64)  # their places in the block, by entry
    block = np.empty((lines.shape[1] * size, tile_rows), np.int32)
    renamed, out_renamed = names.shape[0] > 0, out_names.shape[0] > 0
    for tile in range(first, stop):
        begin = types.uint64(tile) * width
        end = min(begin + width, voxels)
        start = types.uint64(bounds[types.uint64(tile)])
        union = zero
        for r in range(begin, end):
            union |= types.uint64(seen[types.uint64(keys[r] & 0x7FFFFFFF)])
        count, entries = zero, zero
        for line in range(num_lines):
            bits = (union >> (line * step)) & pattern
            if bits != zero:
                present[count] = line
                for k in range(step):
                    if (bits >> k) & one:
                        chosen[entries] = count * step + k
                        offsets[start + entries] = types.int32(line * step + k)
                        entries += one
                count += one
        for r in range(begin, end):
            rank = types.uint64(keys[r] & 0x7FFFFFFF)
            place = places[rank]
            pillar = types.uint64(place >> types.uint32(_Z_BITS))
            shift = types.int64(place & types.uint32(_Z_MASK)) * stride - padding
            beneath = (one << types.uint64(max(shift, 0))) - one
            mask = types.uint64(seen[rank])
            column = r - begin
            for i in range(count):
                line = present[i]
                other = types.uint64(max(lines[pillar, line], types.int32(0)))
                found = starts[other] + types.int32(_popcount(masks[other] & beneath))
                bits = mask >> (line * step)
                at = i * step
                if size == 3:
                    has0, has1, has2 = bits & one, (bits >> one) & one, (bits >> two) & one
                    block[at, column] = found if has0 else absent
                    found += types.int32(has0)
                    block[at + one, column] = found if has1 else absent
                    found += types.int32(has1)
                    block[at + two, column] = found if has2 else absent
                else:
                    for k in range(step):
                        has = (bits >> k) & one
                        block[at + k, column] = found if has else absent
                        found += types.int32(has)
            out_rows[r] = out_names[rank] if out_renamed else types.int32(rank)
        for r in range(end, begin + width):
            out_rows[r] = absent
            for i in range(count * step):
                block[i, r - begin] = absent
        for e in range(entries):
            source = chosen[e]
            for r in range(width):
                row = block[source, r]
                if renamed and row >= 0:
                    row = names[types.uint64(row)]
                rows[start + e, r] = row
