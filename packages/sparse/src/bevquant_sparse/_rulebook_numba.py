"""Rulebooks on a CPU with numba: a bitmap of the grid with ranks instead of a hash table."""

from __future__ import annotations

import functools
import itertools
import math
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevquant_sparse import _bitmap
from bevquant_sparse._geometry import (
    Geometry,
    find_duplicate,
    refuse_duplicate,
    refuse_out_of_range,
)
from bevquant_sparse.runtime.threads import in_parts

_Array = npt.NDArray[np.int64]
_GRAIN = 2048
# Largest grid that gets a bitmap: with the ranks it takes a quarter of a byte per voxel, 128 MiB.
_MAX_BITS = 2**29
# The tables of candidates have one entry per coordinate of an axis.
_MAX_AXIS = 2**13


def fits_bitmap(geometry: Geometry) -> bool:
    """Whether input and output grids are small enough; larger ones are sorted instead."""
    inside = math.prod((geometry.batch_size, *geometry.in_shape))
    outside = math.prod((geometry.batch_size, *geometry.out_shape))
    return max(inside, outside) <= _MAX_BITS and max(geometry.in_shape) <= _MAX_AXIS


def build_numba(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """``(out_indices, neighbours)``, both int32, of checked, contiguous CPU ``indices``."""
    if indices.shape[0] == 0:
        rows = indices.to(torch.int32)
        return rows, rows.new_empty((0, geometry.kernel_volume))
    if indices.dtype != torch.int32:
        # Before narrowing: an int64 coordinate must not wrap into the grid.
        limits = torch.iinfo(torch.int32)
        if bool(((indices < limits.min) | (indices > limits.max)).any()):
            refuse_out_of_range(indices, geometry)
        indices = indices.to(torch.int32)
    return _subm(indices, geometry) if geometry.subm else _strided(indices, geometry)


_idle: list[npt.NDArray[np.uint64]] = []
_lock = Lock()
_KEPT = 2
_KEPT_CELLS = 2**23  # 64 MiB


def _borrow(bits: int) -> npt.NDArray[np.uint64]:
    """Cells for ``bits`` voxels, every word zero, with a spare word before and after."""
    # Cells are kept from call to call, because fresh pages cost milliseconds.
    count = 2 * ((bits >> 6) + 3)
    with _lock:
        for place, cells in enumerate(_idle):
            if cells.shape[0] >= count:
                return _idle.pop(place)
    return np.zeros(count, np.uint64)


def _give_back(cells: npt.NDArray[np.uint64]) -> None:
    """Keep cells whose words are zero again; a caller that fails half-way drops them instead."""
    if cells.shape[0] > _KEPT_CELLS:
        return
    with _lock:
        _idle.append(cells)
        _idle.sort(key=lambda kept: -kept.shape[0])
        del _idle[_KEPT:]


def _four_axes(values: tuple[int, ...], fill: int) -> tuple[int, ...]:
    return (fill,) * (4 - len(values)) + values


def _with_four_axes(indices: Tensor) -> npt.NDArray[np.int32]:
    missing = 5 - indices.shape[1]
    if missing == 0:
        return indices.numpy()
    wide = np.zeros((indices.shape[0], 5), np.int32)
    wide[:, 0] = indices[:, 0].numpy()
    wide[:, 1 + missing :] = indices[:, 1:].numpy()
    return wide


def _sizes(geometry: Geometry, shape: tuple[int, ...]) -> _Array:
    return np.array([geometry.batch_size, *_four_axes(shape, 1)], np.int64)


def _order(
    indices: Tensor, rows: npt.NDArray[np.int32], sizes: _Array, geometry: Geometry
) -> tuple[_Array, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Ascending keys, their rows, and their places in the input with one entry more."""
    keys = np.empty(len(rows), np.int64)
    problem = _bitmap.linear_keys(rows, sizes, keys)
    if problem & 3 == _bitmap.OUT_OF_RANGE:
        refuse_out_of_range(indices, geometry)
    order = np.zeros(len(rows) + 1, np.int32)
    if problem != _bitmap.UNSORTED:
        order[:-1] = np.arange(len(rows))
        return keys, rows, order
    # Packed into one integer, which numpy sorts faster than keys with a permutation.
    bits = len(rows).bit_length()
    packed = np.sort(keys << bits | np.arange(len(rows)))
    keys = packed >> bits
    order[:-1] = packed & ((1 << bits) - 1)
    if (keys[1:] == keys[:-1]).any():
        refuse_duplicate(indices, *find_duplicate(indices))
    return keys, rows.take(order[:-1], 0), order


def _subm(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    rows = _with_four_axes(indices)
    sizes = _sizes(geometry, geometry.in_shape)
    keys, rows, order = _order(indices, rows, sizes, geometry)
    cells = _borrow(int(sizes.prod()))
    marked = cells[2:]
    _bitmap.mark_rows(keys, marked)
    kernel, dilation = _four_axes(geometry.kernel_size, 1), _four_axes(geometry.dilation, 1)
    axes = [[(k - n // 2) * d for k in range(n)] for n, d in zip(kernel, dilation, strict=True)]
    lines = np.array(list(itertools.product(*axes[:3])), np.int64)
    width, step = kernel[3], dilation[3]
    neighbours = torch.empty((len(rows), geometry.kernel_volume), dtype=torch.int32)
    table = neighbours.numpy()

    def fill(start: int, stop: int) -> None:
        if (width, step) == (3, 1):
            _bitmap.find_neighbours_3(start, stop, rows, sizes, lines, cells, order, table)
        else:
            _bitmap.find_neighbours(
                start, stop, rows, sizes, lines, width, step, marked, order, table
            )

    in_parts(fill, len(rows), _GRAIN)
    _bitmap.clear_rows(keys, marked)
    _give_back(cells)
    return indices, neighbours


def _strided(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    rows = _with_four_axes(indices)
    out_sizes = _sizes(geometry, geometry.out_shape)
    _, rows, order = _order(indices, rows, _sizes(geometry, geometry.in_shape), geometry)
    counts, out_keys, offsets = _candidates(geometry)
    out_volume = int(out_sizes[1:].prod())
    out_bits = int(out_sizes.prod())
    count = (out_bits >> 6) + 1
    cells = _borrow(out_bits)
    _bitmap.mark_outputs(rows, out_volume, counts, out_keys, cells)
    total = _bitmap.rank_words(count, cells)
    shape = np.array(geometry.out_shape, np.int64)
    out_indices = torch.empty((total, geometry.ndim + 1), dtype=torch.int32)
    coordinates = out_indices.numpy()
    in_parts(
        lambda start, stop: _bitmap.list_outputs(start, stop, shape, cells, coordinates),
        count,
        _GRAIN,
    )
    neighbours = torch.empty((total, geometry.kernel_volume), dtype=torch.int32)
    table = neighbours.numpy()
    in_parts(lambda start, stop: table[start:stop].fill(-1), total, _GRAIN)
    in_parts(
        lambda start, stop: _bitmap.scatter_inputs(
            start, stop, rows, out_volume, order, counts, out_keys, offsets, cells, table
        ),
        len(rows),
        _GRAIN,
    )
    cells[: 2 * count] = 0
    _give_back(cells)
    return out_indices, neighbours


@functools.lru_cache(maxsize=32)
def _candidates(
    geometry: Geometry,
) -> tuple[npt.NDArray[np.int32], _Array, npt.NDArray[np.int32]]:
    """Per axis and input coordinate: how many outputs it reaches, their keys and kernel offsets."""
    in_shape = _four_axes(geometry.in_shape, 1)
    out_sizes = _sizes(geometry, geometry.out_shape)
    kernel = _four_axes(geometry.kernel_size, 1)
    parameters = (
        _four_axes(geometry.stride, 1),
        _four_axes(geometry.padding, 0),
        _four_axes(geometry.dilation, 1),
    )
    longest, widest = max(in_shape), max(kernel)
    counts = np.zeros((4, longest), np.int32)
    out_keys = np.zeros((4, longest, widest), np.int64)
    offsets = np.zeros((4, longest, widest), np.int32)
    for axis, (stride, padding, dilation) in enumerate(zip(*parameters, strict=True)):
        coordinate = np.arange(in_shape[axis])[:, None]
        k = np.arange(kernel[axis])
        if geometry.transposed:
            out = coordinate * stride - padding + k * dilation
            divides = np.ones_like(out, dtype=bool)
        else:
            out, rest = np.divmod(coordinate + padding - k * dilation, stride)
            divides = rest == 0
        valid = divides & (out >= 0) & (out < out_sizes[axis + 1])
        counts[axis, : in_shape[axis]] = valid.sum(1)
        where, which = np.nonzero(valid)
        slot = np.cumsum(valid, 1)[where, which] - 1
        out_keys[axis, where, slot] = out[where, which] * out_sizes[axis + 2 :].prod()
        offsets[axis, where, slot] = which * math.prod(kernel[axis + 1 :])
    return counts, out_keys, offsets
