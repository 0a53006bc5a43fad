"""Every pair of a strided, dilated or transposed convolution, enumerated from its inputs."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from bevquant_sparse._geometry import Geometry
from bevquant_sparse._keys import lexicographic_rank, row_major_strides

_INT32_LIMIT = 2**31
_INT64_LIMIT = 2**63

_FEW_REMAINDERS = 1024  # by so many, rows look theirs up


def list_pairs(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, int, int]:
    """All pairs, by input row: ``(input row, output key << bits | kernel offset, bound, bits)``.

    Output keys ascend with the output coordinates and lie in ``0…bound − 1``; they are linear in
    the coordinates where that fits, dense ranks otherwise.
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
    strides, bits = row_major_strides(sizes), (geometry.kernel_volume - 1).bit_length()
    weights = row_major_strides((1, *geometry.kernel_size))[1:]
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
    rank = lexicographic_rank(columns, (geometry.batch_size, *geometry.out_shape))
    return rows, (rank << (geometry.kernel_volume - 1).bit_length()) + offsets


def _axis_slots(column: Tensor, geometry: Geometry, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel index, output coordinate and validity along one axis, ``[rows, slots]`` each.

    For a convolution only kernel indices that divide by the stride are listed: with
    ``g = gcd(stride, dilation)`` they lie ``stride/g`` apart, from the first one on, and the
    output coordinate falls by ``dilation/g`` from one to the next.
    """
    size, stride = geometry.kernel_size[axis], geometry.stride[axis]
    padding, dilation = geometry.padding[axis], geometry.dilation[axis]
    device = column.device
    column = column.long()
    if geometry.transposed:
        kernel = torch.arange(size, device=device).expand(column.shape[0], size)
        out = (column * stride - padding).unsqueeze(1) + kernel * dilation
    else:
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
    """For each remainder the first kernel index that divides, and its output's lead.

    The least k with ``k·dilation ≡ rest (mod stride)``: with ``g = gcd(stride, dilation)`` it is
    ``rest/g · (dilation/g)⁻¹ mod stride/g`` where g divides the remainder; `size` where none is.
    """
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


def output_coordinates(
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
