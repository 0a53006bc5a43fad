"""Rulebooks for kernels that need tiles alone, built from pillars of voxels."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bevquant_sparse._bitmap import OUT_OF_RANGE, UNSORTED, _popcount, gray_rank, linear_keys
from bevquant_sparse._geometry import Geometry
from bevquant_sparse._pillars import (
    WORD,
    close_gaps,
    find_pillars,
    list_outputs,
    subm_lines,
    voxel_masks,
)
from bevquant_sparse.runtime import workspace
from bevquant_sparse.runtime.jit import compiled
from bevquant_sparse.runtime.threads import in_chunks, in_parts
from bevquant_sparse.tiles import PART_ROWS, SORTED_ROWS, SparsePlan

# Tiles of a plan straight from pillars, without a table of neighbours between.

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

    ``names`` and ``out_names`` give the rows of ranks; empty where these are the same.
    """
    # Indices are unsigned, because numba tests signed ones for being negative.
    zero, one, two, step = types.uint64(0), types.uint64(1), types.uint64(2), types.uint64(size)
    absent = types.int32(-1)
    pattern = (one << step) - one
    width = types.uint64(tile_rows)
    voxels = types.uint64(keys.shape[0])
    num_lines = types.uint64(lines.shape[1])
    present = np.empty(lines.shape[1], np.uint64)  # lines that some row of the tile sees
    chosen = np.empty(lines.shape[1] * size, np.uint64)  # their places in the block, by entry
    # A row's inputs are found for every line that the tile sees, in a block of their own, and those
    # of the tile's offsets copied: no branch depends on a single voxel, whose pattern nobody could
    # predict.
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


_MAX_OFFSETS = 32  # bits of a voxel's mask
_MAX_PILLARS = 2**25  # with the height, a pillar's number fits 32 bits
_LINES = 64  # lines of the output of a task
_VOXELS = 4096  # of a task


class _Pillars:
    """The pillars of coordinates ``[rows, 4]``."""

    def __init__(
        self,
        count: int,
        pillars: Any,
        masks: Any,
        starts: Any,
        names: Any,
        sizes: Any,
    ) -> None:
        self.count, self.pillars, self.masks, self.starts = count, pillars, masks, starts
        self.names, self.sizes = names, sizes

    @cached_property
    def row_starts(self) -> Any:
        """First pillar of each (batch, y) line, and their number behind the last."""
        lines = np.arange(self.sizes[0] * self.sizes[1] + 1, dtype=np.int64) * self.sizes[2]
        return np.searchsorted(self.pillars[: self.count], lines).astype(np.int64)


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _pillars_of(indices: Tensor, sizes: tuple[int, ...]) -> _Pillars | None:
    """Pillars of int32 coordinates, kept as long as those live; ``None`` for faulty ones."""
    found = _recall(indices, sizes)
    if found is not None:
        return found
    rows = indices.numpy()
    keys = np.empty(len(rows), np.int64)
    state = linear_keys(rows, np.array(sizes, np.int64), keys) & 3
    names = np.empty(0, np.int32)
    # `build_rulebook` names voxels outside of the grid, and repeated ones.
    if state == OUT_OF_RANGE:
        return None
    if state == UNSORTED:
        bits = len(rows).bit_length()
        if math.prod(sizes) << bits >= 2**63:
            return None
        packed = np.sort(keys << bits | np.arange(len(rows)))
        keys = packed >> bits
        names = (packed & ((1 << bits) - 1)).astype(np.int32)
        if (keys[1:] == keys[:-1]).any():
            return None
    pillars, masks = np.empty(len(rows), np.int64), np.empty(len(rows), np.uint64)
    starts = np.empty(len(rows) + 1, np.int32)
    count = find_pillars(keys, sizes[3], pillars, masks, starts)
    made = _Pillars(count, pillars, masks, starts, names, np.array(sizes, np.int64))
    _remember(indices, sizes, made)
    return made


def _recall(indices: Tensor, sizes: tuple[int, ...]) -> _Pillars | None:
    if indices.is_inference():  # its writes are not counted
        return None
    kept: Any = _known.get(indices)
    return kept[1] if kept is not None and kept[0] == (indices._version, sizes) else None


def _remember(indices: Tensor, sizes: tuple[int, ...], pillars: _Pillars) -> None:
    if not indices.is_inference():
        _known[indices] = (indices._version, sizes), pillars


class Tiles:
    """Voxels by mask, and how to find their neighbours; enough to make plans of any tile size."""

    def __init__(
        self,
        source: _Pillars,
        names: Any,
        lines: Any,
        places: Any,
        seen: Any,
        kernel: tuple[int, int, int],
    ) -> None:
        self.source, self.names, self.lines = source, names, lines
        self.places, self.seen, self.kernel = places, seen, kernel

    @cached_property
    def keys(self) -> Any:
        """The voxels, sorted by mask within blocks that lie near each other."""
        keys = workspace.empty((len(self.seen),), np.int64)

        def sort(first: int, stop: int) -> None:
            sort_keys(first, stop, self.seen, keys)
            keys[first:stop].sort()

        in_chunks(sort, len(keys), SORTED_ROWS)
        return keys

    @property
    def num_pairs(self) -> int:
        """As of a `Rulebook`."""
        return int(np.unpackbits(self.seen.view(np.uint8)).sum())

    def plan(self, tile_rows: int) -> SparsePlan:
        """The tiles of so many rows."""
        keys, seen = self.keys, self.seen
        num_tiles = -(-len(keys) // tile_rows)
        bounds = np.zeros(num_tiles + 1, np.int32)
        in_parts(
            lambda first, stop: count_entries(first, stop, keys, seen, tile_rows, bounds),
            num_tiles,
            PART_ROWS // tile_rows,
        )
        np.cumsum(bounds, out=bounds)
        offsets = workspace.empty((int(bounds[-1]),), np.int32)
        rows = workspace.empty((int(bounds[-1]), tile_rows), np.int32)
        out_rows = workspace.empty((num_tiles * tile_rows,), np.int32)
        source = self.source
        in_parts(
            lambda first, stop: fill_entries(
                first, stop, keys, seen, self.places, self.lines, source.masks, source.starts,
                source.names, self.names, *self.kernel, tile_rows, bounds, offsets, rows, out_rows,
            ),
            num_tiles,
            PART_ROWS // tile_rows,
        )  # fmt: skip
        return SparsePlan(tile_rows, num_tiles, bounds, offsets, rows, out_rows)


def build_pillars(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Tiles] | None:
    """Output coordinates and tiles; ``None`` for unsupported geometries and bad coordinates."""
    if (
        indices.device.type != "cpu"
        or indices.dtype != torch.int32
        or not indices.is_contiguous()
        or not len(indices)
        or len(indices) >= _MAX_PILLARS
        or geometry.ndim != 3
        or geometry.transposed
        or geometry.kernel_volume > _MAX_OFFSETS
        or max(geometry.in_shape[2], geometry.out_shape[2]) > WORD
        or geometry.batch_size < 1
        or geometry.batch_size * geometry.in_shape[0] >= 2**31
        or geometry.dilation[2] != 1
        or not (geometry.subm or geometry.dilation == (1, 1, 1))
    ):
        return None
    source = _pillars_of(indices, (geometry.batch_size, *geometry.in_shape))
    if source is None:
        return None
    return (_subm if geometry.subm else _strided)(indices, geometry, source)


def _subm(indices: Tensor, geometry: Geometry, source: _Pillars) -> tuple[Tensor, Tiles]:
    kernel, dilation = geometry.kernel_size, geometry.dilation
    reach = (np.arange(kernel[0], dtype=np.int64) - kernel[0] // 2) * dilation[0]
    lines = workspace.empty((source.count, kernel[0] * kernel[1]), np.int32)
    places, seen = (workspace.empty((len(indices),), np.uint32) for _ in range(2))
    none = np.empty((0, 4), np.int32)
    height = (kernel[2], 1, kernel[2] // 2)

    def work(first: int, stop: int) -> None:
        subm_lines(
            first, stop, source.pillars, source.row_starts, source.sizes, reach, kernel[1],
            dilation[1], lines,
        )  # fmt: skip
        voxel_masks(
            first, stop, source.pillars, source.masks, source.starts, source.masks, lines,
            *height, source.sizes, places, seen, none,
        )  # fmt: skip

    _ = source.row_starts  # made before threads ask for it
    in_parts(work, source.count, _VOXELS)
    return indices, Tiles(source, source.names, lines, places, seen, height)


def _strided(indices: Tensor, geometry: Geometry, source: _Pillars) -> tuple[Tensor, Tiles]:
    kernel, stride, padding = geometry.kernel_size, geometry.stride, geometry.padding
    out_sizes = np.array([geometry.batch_size, *geometry.out_shape], np.int64)
    settings = np.array([kernel, stride, padding], np.int64).T.copy()
    num_lines = geometry.batch_size * geometry.out_shape[0]
    counts = np.zeros((num_lines + 1, 2), np.int64)
    begins = _begins(source, geometry)
    offsets = kernel[0] * kernel[1]
    found = (
        workspace.empty((int(begins[-1]),), np.int64),
        workspace.empty((int(begins[-1]),), np.uint64),
        workspace.empty((int(begins[-1]), offsets), np.int32),
    )
    in_parts(
        lambda first, stop: list_outputs(
            first, stop, source.pillars, source.masks, source.row_starts, source.sizes, out_sizes,
            settings, begins, counts, *found,
        ),
        num_lines,
        _LINES,
    )  # fmt: skip
    np.cumsum(counts, 0, out=counts)
    count, voxels = (int(n) for n in counts[-1])
    pillars, masks, starts, lines = (
        workspace.empty((count,), np.int64),
        workspace.empty((count,), np.uint64),
        workspace.empty((count + 1,), np.int32),
        workspace.empty((count, offsets), np.int32),
    )
    in_parts(
        lambda first, stop: close_gaps(
            first, stop, begins, counts, *found, pillars, masks, starts, lines
        ),
        num_lines,
        _LINES,
    )
    starts[count] = voxels
    places, seen = (workspace.empty((voxels,), np.uint32) for _ in range(2))
    out_indices = torch.from_numpy(workspace.empty((voxels, 4), np.int32))
    height = (kernel[2], stride[2], padding[2])
    rows = out_indices.numpy()
    in_parts(
        lambda first, stop: voxel_masks(
            first, stop, pillars, masks, starts, source.masks, lines, *height, out_sizes,
            places, seen, rows,
        ),
        count,
        _VOXELS,
    )  # fmt: skip
    none = np.empty(0, np.int32)
    made = _Pillars(count, pillars, masks, starts, none, out_sizes)
    _remember(out_indices, (geometry.batch_size, *geometry.out_shape), made)
    return out_indices, Tiles(source, none, lines, places, seen, height)


def _begins(source: _Pillars, geometry: Geometry) -> Any:
    """Where each line of the output may begin, so that none reaches the next; one entry more.

    An input pillar is seen from at most ⌈size / stride⌉ outputs of each line that sees its own.
    """
    size, stride, padding = geometry.kernel_size, geometry.stride, geometry.padding
    height, lines = geometry.in_shape[0], geometry.out_shape[0]
    row = np.arange(lines)[:, None] * stride[0] - padding[0] + np.arange(size[0])
    inside = (row >= 0) & (row < height)
    rows = np.where(inside, row, 0) + np.arange(geometry.batch_size)[:, None, None] * height
    starts = source.row_starts
    seen = ((starts[rows + 1] - starts[rows]) * inside).sum(-1).reshape(-1)
    most = np.minimum(seen * -(-size[1] // stride[1]), geometry.out_shape[1])
    return np.concatenate([[0], most.cumsum()])
