"""Rulebooks with torch alone, on any device: sorted integer keys and few binary searches."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from bevquant_sparse._geometry import Geometry
from bevquant_sparse._indices import check_range, find_duplicate, refuse_duplicate

_KEY_LIMIT = 2**62


def build_torch(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """``(in_indices, out_indices, neighbours)`` of checked, contiguous ``indices``."""
    check_range(indices, geometry)
    if indices.shape[0] == 0:
        return _empty(indices, geometry)
    if geometry.subm:
        in_indices = indices.to(torch.int32)
        return in_indices, in_indices, _subm_neighbours(indices, geometry)
    return _strided(indices, geometry)


def _empty(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    rows = indices.to(torch.int32)
    neighbours = rows.new_empty((0, geometry.kernel_volume))
    return rows, rows, neighbours


def _radices(sizes: tuple[int, ...]) -> list[int]:
    """Row-major strides of a grid with these sizes; the leading size does not matter."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return strides


def _keys(indices: Tensor, strides: list[int], origin: int = 0) -> Tensor:
    """``indices @ strides + origin`` in int64 (integer matmul is missing on CUDA)."""
    keys = torch.full_like(indices[:, 0], origin, dtype=torch.int64)
    for column, stride in enumerate(strides):
        keys.add_(indices[:, column].long(), alpha=stride)
    return keys


def _lexicographic_rank(columns: list[Tensor], sizes: tuple[int, ...]) -> Tensor:
    """Dense rank of each row, exact for any int32 grid.

    Columns are folded one by one: a rank is below the number of rows (< 2³¹) and a coordinate
    below 2³¹, so ``rank · size + coordinate`` stays below 2⁶² whatever the grid's volume.
    """
    rank = columns[0].long()
    for column, size in zip(columns[1:], sizes[1:], strict=True):
        rank = torch.unique(rank * size + column.long(), return_inverse=True)[1]
    return rank


def _sort_with_rows(keys: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """Sorted ``keys`` (each in 0…bound − 1) and the stable permutation that sorts them."""
    count = keys.shape[0]
    bits = max(count - 1, 1).bit_length()
    if keys.device.type != "cpu" or bound << bits >= 2**63:
        sorted_keys, order = torch.sort(keys, stable=True)
        return sorted_keys, order
    # Key and row in one integer: numpy's vectorised sort of plain integers is several times
    # faster on a CPU than any sort that carries a permutation, and the result is stable.
    packed = torch.bitwise_left_shift(keys, bits)
    packed |= torch.arange(count)
    merged = torch.from_numpy(np.sort(packed.numpy()))
    return torch.bitwise_right_shift(merged, bits), merged & ((1 << bits) - 1)


def _subm_neighbours(indices: Tensor, geometry: Geometry) -> Tensor:
    """Neighbour table of a SubM convolution."""
    kernel, dilation = geometry.kernel_size, geometry.dilation
    margin = tuple((k // 2) * d for k, d in zip(kernel, dilation, strict=True))
    # A margin on both sides of every axis gives each neighbour, inside the grid or not, a key of
    # its own: no border tests, and lines never run into each other.
    sizes = (
        geometry.batch_size,
        *(n + 2 * m for n, m in zip(geometry.in_shape, margin, strict=True)),
    )
    bound = math.prod(sizes)
    if bound >= _KEY_LIMIT:
        return _subm_wide(indices, geometry, margin, sizes)
    strides = _radices(sizes)
    origin = sum(m * s for m, s in zip(margin, strides[1:], strict=True))
    keys = _keys(indices, strides, origin)
    order: Tensor | None = None
    if not bool((keys[1:] > keys[:-1]).all()):
        keys, order = _sort_with_rows(keys, bound)
        if bool((keys[1:] == keys[:-1]).any()):
            refuse_duplicate(indices, *find_duplicate(indices))
    table = _search_lines(keys, geometry, strides)
    return _to_input_rows(table, order)


def _search_lines(keys: Tensor, geometry: Geometry, strides: list[int]) -> Tensor:
    """``[kernel_volume, rows]`` positions in the sorted ``keys``; ``rows`` where empty."""
    rows = keys.shape[0]
    kernel, dilation = geometry.kernel_size, geometry.dilation
    volume, last = geometry.kernel_volume, kernel[-1]
    own = torch.arange(rows, device=keys.device)
    fenced = torch.cat((keys, keys.new_full((1,), 2**63 - 1)))
    table = torch.full((volume, rows + 1), rows, dtype=torch.int64, device=keys.device)
    table[volume // 2, :rows] = own
    lines = list(itertools.product(*(range(k) for k in kernel[:-1])))
    # The table is symmetric: only offsets before the centre are searched, the others mirrored.
    for line, indices in enumerate(lines[: len(lines) // 2 + 1]):
        delta = sum(
            (k - size // 2) * d * stride
            for k, size, d, stride in zip(indices, kernel, dilation, strides[1:], strict=False)
        )
        position: Tensor | None = None
        for step in range(last):
            offset = line * last + step
            if offset >= volume // 2:
                break
            wanted = keys + (delta + (step - last // 2) * dilation[-1])
            if position is None or dilation[-1] != 1:
                position = torch.searchsorted(keys, wanted)
            hit = fenced[position] == wanted
            found = torch.where(hit, position, rows)
            table[offset, :rows] = found
            table[volume - 1 - offset].scatter_(0, found, own)
            # Neighbours along the last axis have consecutive keys, hence adjacent positions.
            position = position + hit
    return table[:, :rows]


def _to_input_rows(table: Tensor, order: Tensor | None) -> Tensor:
    """From positions in sorted order to int32 ``[rows, kernel_volume]`` input rows."""
    rows = table.shape[1]
    names = torch.arange(rows + 1, dtype=torch.int32, device=table.device)
    if order is not None:
        names[:rows] = order.to(torch.int32)
    names[rows] = -1
    by_row = names[table].t()
    if order is None:
        return by_row.contiguous()
    neighbours = torch.empty(by_row.shape, dtype=torch.int32, device=table.device)
    neighbours[order] = by_row
    return neighbours


def _subm_wide(
    indices: Tensor, geometry: Geometry, margin: tuple[int, ...], sizes: tuple[int, ...]
) -> Tensor:
    """SubM on a grid whose volume does not fit an int64 key: ranks instead of keys."""
    rows, volume = indices.shape[0], geometry.kernel_volume
    centre = [indices[:, axis + 1].long() + margin[axis] for axis in range(geometry.ndim)]
    columns = [indices[:, 0].long().repeat(volume + 1)]
    offsets = list(itertools.product(*(range(k) for k in geometry.kernel_size)))
    for axis, column in enumerate(centre):
        shifts = [k[axis] * geometry.dilation[axis] - margin[axis] for k in offsets]
        columns.append(torch.cat([column, *(column + shift for shift in shifts)]))
    rank = _lexicographic_rank(columns, sizes)
    own, wanted = rank[:rows], rank[rows:]
    holder = torch.full((int(rank.max()) + 1,), -1, dtype=torch.int32, device=indices.device)
    names = torch.arange(rows, dtype=torch.int32, device=indices.device)
    holder[own] = names
    if not bool((holder[own] == names).all()):
        refuse_duplicate(indices, *find_duplicate(indices))
    return holder[wanted].view(volume, rows).t().contiguous()


def _strided(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbour table and output coordinates of a strided, dilated or transposed convolution."""
    rows, offsets, columns = _candidates(indices, geometry)
    sizes = (geometry.batch_size, *geometry.out_shape)
    bound = math.prod(sizes)
    if bound < _KEY_LIMIT:
        keys = _keys(torch.stack(columns, 1), _radices(sizes))
    else:
        keys = _lexicographic_rank(columns, sizes)
        bound = max(keys.shape[0], 1)
    keys, order = _sort_with_rows(keys, bound)
    starts = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=starts[1:])
    out_rows = starts.cumsum(0) - 1
    first = order[starts]
    out_indices = torch.stack([column[first] for column in columns], 1).to(torch.int32)
    volume = geometry.kernel_volume
    slots = out_rows * volume + offsets[order]
    neighbours = torch.full(
        (out_indices.shape[0], volume), -1, dtype=torch.int32, device=indices.device
    )
    neighbours.view(-1)[slots] = rows[order].to(torch.int32)
    # Two rows with one coordinate want the same slot: one of them is lost from the table.
    if int((neighbours >= 0).sum()) != rows.shape[0]:
        refuse_duplicate(indices, *find_duplicate(indices))
    return indices.to(torch.int32), out_indices, neighbours


def _candidates(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Every pair as ``(input row, kernel offset, output coordinate columns)``."""
    ndim = geometry.ndim
    offset = torch.zeros([1] * (ndim + 1), dtype=torch.int64, device=indices.device)
    valid = torch.ones_like(offset, dtype=torch.bool)
    per_axis: list[Tensor] = []
    for axis in range(ndim):
        kernel, out = _axis_candidates(indices[:, axis + 1].long(), geometry, axis)
        inside = (kernel >= 0) & (kernel < geometry.kernel_size[axis])
        inside &= (out >= 0) & (out < geometry.out_shape[axis])
        shape = [-1] + [1] * ndim
        shape[axis + 1] = inside.shape[1]
        valid = valid & inside.view(shape)
        offset = offset * geometry.kernel_size[axis] + kernel.reshape(shape)
        per_axis.append(out)
    where = valid.nonzero(as_tuple=True)
    rows = where[0]
    columns = [indices[:, 0].long()[rows]]
    columns += [per_axis[axis][rows, where[axis + 1]] for axis in range(ndim)]
    return rows, offset[where], columns


def _axis_candidates(column: Tensor, geometry: Geometry, axis: int) -> tuple[Tensor, Tensor]:
    """Kernel indices and output coordinates along one axis, ``[rows, slots]`` each.

    For a convolution only kernel indices that divide by the stride are listed: with
    ``g = gcd(stride, dilation)`` they lie ``stride/g`` apart, from the first one on.
    """
    size, stride = geometry.kernel_size[axis], geometry.stride[axis]
    padding, dilation = geometry.padding[axis], geometry.dilation[axis]
    column = column.unsqueeze(1)
    device = column.device
    if geometry.transposed:
        kernel = torch.arange(size, device=device)
        return kernel.expand(column.shape[0], size), column * stride - padding + kernel * dilation
    step = stride // math.gcd(stride, dilation)
    slots = -(-size // step)
    first = [
        next((k for k in range(min(step, size)) if (rest - k * dilation) % stride == 0), size)
        for rest in range(stride)
    ]
    shifted = column + padding
    start = torch.tensor(first, device=device)[shifted % stride]
    kernel = start + torch.arange(slots, device=device) * step
    return kernel, torch.div(shifted - kernel * dilation, stride, rounding_mode="floor")
