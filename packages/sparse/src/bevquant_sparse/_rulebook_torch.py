"""Rulebooks with torch alone, on any device: sorted integer keys and few binary searches."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from bevquant_sparse._geometry import Geometry
from bevquant_sparse._indices import check_range, find_duplicate, refuse_duplicate
from bevquant_sparse._keys import (
    KEY_LIMIT,
    lexicographic_rank,
    linear_keys,
    row_major_strides,
    sort_keys,
    sort_with_rows,
)
from bevquant_sparse._pairs import list_pairs, output_coordinates

# Grids up to this many voxels (16 MiB of int32) are looked up in a dense table: one gather finds
# what a binary search finds in seventeen steps.
_DENSE_LIMIT = 2**22


def build_torch(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """``(out_indices, neighbours)``, both int32, of checked, contiguous ``indices``."""
    if indices.shape[0] == 0:
        rows = indices.to(torch.int32)
        return rows, rows.new_empty((0, geometry.kernel_volume))
    check_range(indices, geometry)
    if geometry.subm:
        return indices.to(torch.int32), _subm(indices, geometry)
    _refuse_duplicates(indices, (geometry.batch_size, *geometry.in_shape))
    return _strided(indices, geometry)


def _refuse_duplicates(indices: Tensor, sizes: tuple[int, ...]) -> None:
    bound = math.prod(sizes)
    if bound >= KEY_LIMIT:
        rank = lexicographic_rank(list(indices.unbind(1)), sizes)
        if int(rank.max()) + 1 != rank.shape[0]:
            refuse_duplicate(indices, *find_duplicate(indices))
        return
    keys = linear_keys(indices, row_major_strides(sizes))
    if bool((keys[1:] > keys[:-1]).all()):
        return
    keys = sort_keys(keys)
    if bool((keys[1:] == keys[:-1]).any()):
        refuse_duplicate(indices, *find_duplicate(indices))


def _subm(indices: Tensor, geometry: Geometry) -> Tensor:
    """Neighbour table of a SubM convolution."""
    # A margin on both sides of every axis gives each neighbour, inside the grid or not, a key of
    # its own: no border tests, and lines never run into each other. SubM's padding is that margin.
    margin = geometry.padding
    sizes = (
        geometry.batch_size,
        *(n + 2 * m for n, m in zip(geometry.in_shape, margin, strict=True)),
    )
    bound = math.prod(sizes)
    if bound >= KEY_LIMIT:
        return _subm_by_rank(indices, geometry, sizes)
    strides = row_major_strides(sizes)
    origin = sum(m * s for m, s in zip(margin, strides[1:], strict=True))
    keys = linear_keys(indices, strides, origin)
    if bound <= _DENSE_LIMIT:
        return _subm_dense(indices, keys, geometry, strides, bound)
    order: Tensor | None = None
    if not bool((keys[1:] > keys[:-1]).all()):
        keys, order = sort_with_rows(keys, bound)
        if bool((keys[1:] == keys[:-1]).any()):
            refuse_duplicate(indices, *find_duplicate(indices))
    return _to_input_rows(_search_lines(keys, geometry, strides), order)


def _offsets(geometry: Geometry) -> list[tuple[int, ...]]:
    """Coordinate differences of a SubM kernel's offsets, row-major."""
    axes = zip(geometry.kernel_size, geometry.dilation, strict=True)
    return list(
        itertools.product(*([(k - size // 2) * d for k in range(size)] for size, d in axes))
    )


def _subm_dense(
    indices: Tensor, keys: Tensor, geometry: Geometry, strides: list[int], bound: int
) -> Tensor:
    table = torch.full((bound,), -1, dtype=torch.int32, device=keys.device)
    rows = torch.arange(keys.shape[0], dtype=torch.int32, device=keys.device)
    table.scatter_(0, keys, rows)
    if not bool((table.index_select(0, keys) == rows).all()):
        refuse_duplicate(indices, *find_duplicate(indices))
    deltas = [
        sum(o * s for o, s in zip(offset, strides[1:], strict=True))
        for offset in _offsets(geometry)
    ]
    wanted = keys.unsqueeze(1) + torch.tensor(deltas, device=keys.device)
    return table.index_select(0, wanted.view(-1)).view(wanted.shape)


def _search_lines(keys: Tensor, geometry: Geometry, strides: list[int]) -> Tensor:
    """int32 ``[kernel_volume, rows]`` positions in the sorted ``keys``, −1 where empty."""
    rows, device = keys.shape[0], keys.device
    volume, last = geometry.kernel_volume, geometry.kernel_size[-1]
    own = torch.arange(rows, dtype=torch.int32, device=device)
    fenced = torch.cat((keys, keys.new_full((1,), 2**63 - 1)))
    absent = torch.full((1,), -1, dtype=torch.int32, device=device)
    # Column 0 is a bin for what the mirrored half has no place for.
    table = torch.full((volume, rows + 1), -1, dtype=torch.int32, device=device)
    table[volume // 2, 1:] = own
    target = torch.empty_like(keys)
    position = own
    # The table is symmetric: only offsets before the centre are searched, the others mirrored.
    for number, offset in enumerate(_offsets(geometry)[: volume // 2]):
        wanted = keys + sum(o * s for o, s in zip(offset, strides[1:], strict=True))
        if number % last == 0 or geometry.dilation[-1] != 1:
            position = torch.searchsorted(keys, wanted, out_int32=True)
        hit = fenced.index_select(0, position) == wanted
        found = torch.where(hit, position, absent, out=table[number, 1:])
        torch.add(found, 1, out=target)
        table[volume - 1 - number].scatter_(0, target, own)
        # Neighbours along the last axis have consecutive keys, hence adjacent positions.
        position = position + hit
    return table[:, 1:]


def _to_input_rows(table: Tensor, order: Tensor | None) -> Tensor:
    """From positions in sorted order to int32 ``[rows, kernel_volume]`` input rows."""
    by_row = table.t().contiguous()
    if order is None:
        return by_row
    names = torch.cat((order.new_full((1,), -1), order)).to(torch.int32)
    by_row = names.index_select(0, by_row.view(-1).add_(1)).view(by_row.shape)
    rows = torch.arange(order.shape[0], device=order.device)
    return by_row.index_select(0, torch.empty_like(order).scatter_(0, order, rows))


def _subm_by_rank(indices: Tensor, geometry: Geometry, sizes: tuple[int, ...]) -> Tensor:
    """SubM on a grid whose volume does not fit an int64 key: ranks instead of keys."""
    rows, volume = indices.shape[0], geometry.kernel_volume
    offsets = _offsets(geometry)
    columns = [indices[:, 0].long().repeat(volume + 1)]
    for axis in range(geometry.ndim):
        column = indices[:, axis + 1].long() + geometry.padding[axis]
        columns.append(torch.cat([column, *(column + offset[axis] for offset in offsets)]))
    rank = lexicographic_rank(columns, sizes)
    own, wanted = rank[:rows], rank[rows:]
    holder = torch.full((rank.shape[0],), -1, dtype=torch.int32, device=indices.device)
    names = torch.arange(rows, dtype=torch.int32, device=indices.device)
    holder.scatter_(0, own, names)
    if not bool((holder.index_select(0, own) == names).all()):
        refuse_duplicate(indices, *find_duplicate(indices))
    return holder.index_select(0, wanted).view(volume, rows).t().contiguous()


def _strided(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Output coordinates and neighbours of a strided, dilated or transposed convolution."""
    volume = geometry.kernel_volume
    rows, tagged, bound, bits = list_pairs(indices, geometry)
    tagged, rows = sort_with_rows(tagged, bound << bits, rows)
    keys, offsets = tagged >> bits, tagged & ((1 << bits) - 1)
    starts = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=starts[1:])
    first = starts.nonzero().view(-1)
    out_indices = output_coordinates(
        indices, rows.index_select(0, first), offsets.index_select(0, first), geometry
    )
    slots = (starts.cumsum(0) - 1).mul_(volume).add_(offsets)
    table = torch.full((first.shape[0] * volume,), -1, dtype=torch.int32, device=rows.device)
    table.scatter_(0, slots, rows.to(torch.int32))
    return out_indices, table.view(-1, volume)
