"""Rulebooks with torch alone, on any device: sorted integer keys and few binary searches.

Keys are linear where int64 holds them, dense ranks beyond. A SubM convolution looks its neighbours
up; of every other kind all pairs are enumerated from the inputs.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from bevquant_sparse._geometry import Geometry, check_range, find_duplicate, refuse_duplicate

# Grids up to this many voxels (16 MiB of int32) are looked up in a dense table: one gather finds
# what a binary search finds in seventeen steps.
_DENSE_LIMIT = 2**22
_KEY_LIMIT = 2**62
_INT32_LIMIT = 2**31
_INT64_LIMIT = 2**63
_FEW_REMAINDERS = 1024  # by so many, rows look theirs up


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
    if bound >= _KEY_LIMIT:
        rank = _lexicographic_rank(list(indices.unbind(1)), sizes)
        if int(rank.max()) + 1 != rank.shape[0]:
            refuse_duplicate(indices, *find_duplicate(indices))
        return
    keys = _linear_keys(indices, _row_major_strides(sizes))
    if bool((keys[1:] > keys[:-1]).all()):
        return
    keys = _sort_keys(keys)
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
    if bound >= _KEY_LIMIT:
        return _subm_by_rank(indices, geometry, sizes)
    strides = _row_major_strides(sizes)
    origin = sum(m * s for m, s in zip(margin, strides[1:], strict=True))
    keys = _linear_keys(indices, strides, origin)
    if bound <= _DENSE_LIMIT:
        return _subm_dense(indices, keys, geometry, strides, bound)
    order: Tensor | None = None
    if not bool((keys[1:] > keys[:-1]).all()):
        keys, order = _sort_with_rows(keys, bound)
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
    rank = _lexicographic_rank(columns, sizes)
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
    rows, tagged, bound, bits = _list_pairs(indices, geometry)
    tagged, rows = _sort_with_rows(tagged, bound << bits, rows)
    keys, offsets = tagged >> bits, tagged & ((1 << bits) - 1)
    starts = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=starts[1:])
    first = starts.nonzero().view(-1)
    out_indices = _output_coordinates(
        indices, rows.index_select(0, first), offsets.index_select(0, first), geometry
    )
    slots = (starts.cumsum(0) - 1).mul_(volume).add_(offsets)
    table = torch.full((first.shape[0] * volume,), -1, dtype=torch.int32, device=rows.device)
    table.scatter_(0, slots, rows.to(torch.int32))
    return out_indices, table.view(-1, volume)


def _list_pairs(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, int, int]:
    """All pairs, by input row: ``(input row, output key << bits | kernel offset, bound, bits)``.

    Output keys ascend with the output coordinates and lie in ``0…bound − 1``.
    """
    slots = [_axis_slots(indices[:, a + 1], geometry, a) for a in range(geometry.ndim)]
    sizes = (geometry.batch_size, *geometry.out_shape)
    bound, bits = math.prod(sizes), (geometry.kernel_volume - 1).bit_length()
    # Partial keys are summed over the axes, an invalid one being negative enough to make every
    # sum negative without leaving the integer type: half the memory traffic where int32 does.
    for dtype, limit in ((torch.int32, _INT32_LIMIT), (torch.int64, _INT64_LIMIT)):
        share = limit // (geometry.ndim + 1)
        if bound << bits < share:
            return *_list_linear(indices, slots, geometry, dtype, -share), bound, bits
    # Too large a grid for linear keys: dense ranks of the rows keep the order.
    rows, tagged = _list_wide(indices, slots, geometry)
    return rows, tagged, rows.shape[0] + 1, bits


def _list_linear(
    indices: Tensor,
    slots: list[tuple[Tensor, Tensor, Tensor]],
    geometry: Geometry,
    dtype: torch.dtype,
    invalid: int,
) -> tuple[Tensor, Tensor]:
    sizes = (geometry.batch_size, *geometry.out_shape)
    strides, bits = _row_major_strides(sizes), (geometry.kernel_volume - 1).bit_length()
    weights = _row_major_strides((1, *geometry.kernel_size))[1:]
    total = indices[:, :1].to(dtype) * (strides[0] << bits)
    for axis, (kernel, out, inside) in enumerate(slots):
        part = (out * (strides[axis + 1] << bits)).add_(kernel, alpha=weights[axis])
        part = part.masked_fill_(~inside, invalid).to(dtype)
        total = (total.unsqueeze(2) + part.unsqueeze(1)).view(part.shape[0], -1)
    chosen = (total >= 0).view(-1).nonzero().view(-1)
    rows = _divide(chosen, total.shape[1])[0]
    return rows, total.view(-1).index_select(0, chosen).long()


def _list_wide(
    indices: Tensor,
    slots: list[tuple[Tensor, Tensor, Tensor]],
    geometry: Geometry,
) -> tuple[Tensor, Tensor]:
    ndim = geometry.ndim
    inside = torch.ones([indices.shape[0]] + [1] * ndim, dtype=torch.bool, device=indices.device)
    for axis, (_, _, valid) in enumerate(slots):
        shape = [-1] + [1] * ndim
        shape[axis + 1] = valid.shape[1]
        inside = inside & valid.view(shape)
    where = inside.nonzero(as_tuple=True)
    rows = where[0]
    columns = [indices[:, 0].index_select(0, rows)]
    offsets = torch.zeros_like(rows)
    for axis, (kernel, out, _) in enumerate(slots):
        columns.append(out[rows, where[axis + 1]])
        offsets = (
            offsets * geometry.kernel_size[axis] + kernel.expand_as(out)[rows, where[axis + 1]]
        )
    rank = _lexicographic_rank(columns, (geometry.batch_size, *geometry.out_shape))
    return rows, (rank << (geometry.kernel_volume - 1).bit_length()) + offsets


def _axis_slots(column: Tensor, geometry: Geometry, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel index, output coordinate and validity along one axis, ``[rows, slots]`` each."""
    size, stride = geometry.kernel_size[axis], geometry.stride[axis]
    padding, dilation = geometry.padding[axis], geometry.dilation[axis]
    device = column.device
    column = column.long()
    if geometry.transposed:
        kernel = torch.arange(size, device=device).expand(column.shape[0], size)
        out = (column * stride - padding).unsqueeze(1) + kernel * dilation
    else:
        # Only kernel indices that divide by the stride are listed: with g = gcd(stride, dilation)
        # they lie stride/g apart, from the first one on, and the output coordinate falls by
        # dilation/g from one to the next.
        common = math.gcd(stride, dilation)
        step = stride // common
        slot = torch.arange(-(-size // step), device=device)
        quotient, rest = _divide(column + padding, stride)
        few = stride <= _FEW_REMAINDERS
        remainders = torch.arange(stride, device=device) if few else rest
        start, lead = _first_kernel_index(remainders, size, stride, dilation)
        if few:
            start, lead = start.index_select(0, rest), lead.index_select(0, rest)
        quotient += lead
        kernel = start.unsqueeze(1) + slot * step
        out = quotient.unsqueeze(1) - slot * (dilation // common)
    inside = (out >= 0).logical_and_(out < geometry.out_shape[axis])
    return kernel, out, inside.logical_and_(kernel < size)


def _first_kernel_index(
    rest: Tensor, size: int, stride: int, dilation: int
) -> tuple[Tensor, Tensor]:
    """For each remainder the first kernel index that divides, and its output's lead."""
    # The least k with k·dilation ≡ rest (mod stride) is rest/g · (dilation/g)⁻¹ mod stride/g, where
    # g = gcd(stride, dilation) divides the remainder; `size` stands for none.
    common = math.gcd(stride, dilation)
    step = stride // common
    inverse = pow(dilation // common, -1, step)
    first = torch.where(rest % common == 0, rest // common * inverse % step, size).clamp(max=size)
    return first, torch.div(rest - first * dilation, stride, rounding_mode="floor")


def _divide(values: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """Quotient and remainder of non-negative values; strides are mostly powers of two."""
    if stride & (stride - 1) == 0:
        return values >> (stride.bit_length() - 1), values & (stride - 1)
    quotient = torch.div(values, stride, rounding_mode="floor")
    return quotient, values - quotient * stride


def _output_coordinates(
    indices: Tensor, rows: Tensor, offsets: Tensor, geometry: Geometry
) -> Tensor:
    """int32 coordinates of the outputs that these (input row, kernel offset) pairs reach."""
    out = torch.empty((rows.shape[0], geometry.ndim + 1), dtype=torch.int32, device=indices.device)
    out[:, 0] = indices[:, 0].index_select(0, rows)
    kernel = torch.tensor(
        list(itertools.product(*map(range, geometry.kernel_size))), device=indices.device
    )
    for axis in range(geometry.ndim):
        place = kernel[:, axis].contiguous().index_select(0, offsets) * geometry.dilation[axis]
        column = indices[:, axis + 1].index_select(0, rows).long()
        stride, padding = geometry.stride[axis], geometry.padding[axis]
        if geometry.transposed:
            out[:, axis + 1] = column * stride - padding + place
        else:
            out[:, axis + 1] = _divide(column + padding - place, stride)[0]
    return out


def _row_major_strides(sizes: tuple[int, ...]) -> list[int]:
    """Row-major strides of a grid with these sizes; the leading size does not matter."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return strides


def _linear_keys(indices: Tensor, strides: list[int], origin: int = 0) -> Tensor:
    """``indices @ strides + origin`` in int64 (CUDA has no integer matmul)."""
    keys = indices[:, -1].long() + origin
    for column, stride in enumerate(strides[:-1]):
        keys.add_(indices[:, column].long(), alpha=stride)
    return keys


def _lexicographic_rank(columns: list[Tensor], sizes: tuple[int, ...]) -> Tensor:
    """Dense rank of each row, exact for any int32 grid."""
    # Folded one by one, a rank is below the number of rows (< 2³¹) and a coordinate below 2³¹:
    # their product stays below 2⁶² whatever the grid's volume.
    rank = columns[0].long()
    for column, size in zip(columns[1:], sizes[1:], strict=True):
        rank = torch.unique(rank * size + column.long(), return_inverse=True)[1]
    return rank


def _sort_keys(keys: Tensor) -> Tensor:
    """Sorted copy of ``keys``: on a CPU by numpy, whose sort of plain integers is vectorised."""
    if keys.device.type == "cpu":
        return torch.from_numpy(np.sort(keys.numpy()))
    return torch.sort(keys).values


def _sort_with_rows(keys: Tensor, bound: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sorted ``keys`` (each in 0…bound − 1) and ``rows`` in that order, ties in row order.

    ``rows`` must ascend; without it the rows are numbered, so the result is a permutation.
    """
    if rows is None:
        rows = torch.arange(keys.shape[0], device=keys.device)
    bits = keys.shape[0].bit_length() if rows.numel() == 0 else max(int(rows[-1]), 1).bit_length()
    if keys.device.type != "cpu" or bound << bits >= 2**63:
        ordered, order = torch.sort(keys, stable=True)
        return ordered, rows.index_select(0, order)
    # Key and row in one integer: sorting plain integers is several times faster on a CPU than any
    # sort that carries a permutation, and the result is stable.
    merged = _sort_keys((keys << bits).bitwise_or_(rows))
    return merged >> bits, merged & ((1 << bits) - 1)
