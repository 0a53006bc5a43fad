"""Rulebooks on a CPU with numba: a bitmap of the grid with ranks instead of a hash table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevquant_sparse import _bitmap
from bevquant_sparse._geometry import Geometry
from bevquant_sparse._indices import find_duplicate, refuse_duplicate, refuse_out_of_range
from bevquant_sparse._threads import share

_Array = npt.NDArray[np.int64]
_GRAIN = 2048
# Largest grid that gets a bitmap: 2³⁰ voxels take 128 MiB, and half as much again for the ranks.
_MAX_BITS = 2**30
_MAX_AXIS = 2**20


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


class _Workspace:
    """A bitmap, all zero between uses, and ranks; kept, because fresh pages cost milliseconds."""

    def __init__(self, count: int) -> None:
        self.words = np.zeros(count, np.uint64)
        self.ranks = np.zeros(count, np.int32)


_idle: list[_Workspace] = []
_lock = Lock()
_KEPT = 2
_KEPT_WORDS = 2**22  # 48 MiB with the ranks


def _borrow(bits: int) -> _Workspace:
    """A workspace for ``bits`` voxels, whose words end with a spare zero word."""
    count = (bits >> 6) + 2
    with _lock:
        for place, workspace in enumerate(_idle):
            if workspace.words.shape[0] >= count:
                return _idle.pop(place)
    return _Workspace(count)


def _give_back(workspace: _Workspace) -> None:
    """Keep a zeroed workspace for the next caller; one that failed half-way is not given back."""
    if workspace.words.shape[0] > _KEPT_WORDS:
        return
    with _lock:
        _idle.append(workspace)
        _idle.sort(key=lambda kept: -kept.words.shape[0])
        del _idle[_KEPT:]


def _for_chunks(count: int, work: Callable[[int, int], object]) -> None:
    chunks = max(1, min(torch.get_num_threads(), count // _GRAIN))
    bounds = [count * i // chunks for i in range(chunks + 1)]
    share(lambda chunk: work(bounds[chunk], bounds[chunk + 1]), chunks)


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


def _subm(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    rows = _with_four_axes(indices)
    sizes = _sizes(geometry, geometry.in_shape)
    workspace = _borrow(int(sizes.prod()))
    words, ranks = workspace.words, workspace.ranks
    keys = np.empty(len(rows), np.int64)
    problem = _bitmap.mark_rows(rows, sizes, keys, words, ranks)
    if problem & 3 == _bitmap.OUT_OF_RANGE:
        refuse_out_of_range(indices, geometry)
    names = np.empty(0, np.int32)
    if problem == _bitmap.UNSORTED:
        _bitmap.clear_keys(keys, words)
        ordered, names = _sort(keys)
        if _bitmap.mark_sorted(ordered, words, ranks) >= 0:
            refuse_duplicate(indices, *find_duplicate(indices))
    kernel, dilation = _four_axes(geometry.kernel_size, 1), _four_axes(geometry.dilation, 1)
    axes = [[(k - n // 2) * d for k in range(n)] for n, d in zip(kernel, dilation, strict=True)]
    lines = np.array(list(itertools.product(*axes[:3])), np.int64)
    reach, step = (kernel[3] // 2) * dilation[3], dilation[3]
    neighbours = torch.empty((len(rows), geometry.kernel_volume), dtype=torch.int32)
    table = neighbours.numpy()
    _for_chunks(
        len(rows),
        lambda start, stop: _bitmap.find_neighbours(
            start, stop, rows, sizes, lines, reach, step, words, ranks, names, table
        ),
    )
    _bitmap.clear_keys(keys, words)
    _give_back(workspace)
    return indices, neighbours


def _sort(keys: _Array) -> tuple[_Array, npt.NDArray[np.int32]]:
    """Sorted keys and their rows; packed into one integer, which numpy sorts fastest."""
    bits = max(len(keys) - 1, 1).bit_length()
    packed = np.sort(keys << bits | np.arange(len(keys)))
    return packed >> bits, (packed & ((1 << bits) - 1)).astype(np.int32)


def _strided(indices: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    rows = _with_four_axes(indices)
    sizes, out_sizes = _sizes(geometry, geometry.in_shape), _sizes(geometry, geometry.out_shape)
    counts, out_keys, offsets = _candidates(geometry, out_sizes)
    out_volume = int(out_sizes[1:].prod())
    out_bits = int(out_sizes.prod())
    count = (out_bits >> 6) + 1
    workspace = _borrow(out_bits)
    words, ranks = workspace.words, workspace.ranks
    keys = np.empty(len(rows), np.int64)
    problem = _bitmap.mark_outputs(rows, sizes, out_volume, keys, counts, out_keys, words)
    if problem & 3 == _bitmap.OUT_OF_RANGE:
        refuse_out_of_range(indices, geometry)
    if problem == _bitmap.UNSORTED:
        keys.sort()
        if (keys[1:] == keys[:-1]).any():
            refuse_duplicate(indices, *find_duplicate(indices))
    total = _bitmap.rank_words(count, words, ranks)
    listed = torch.empty((total, 5), dtype=torch.int32)
    coordinates = listed.numpy()
    _for_chunks(
        count,
        lambda start, stop: _bitmap.list_outputs(start, stop, out_sizes, words, ranks, coordinates),
    )
    neighbours = torch.empty((total, geometry.kernel_volume), dtype=torch.int32)
    table = neighbours.numpy()
    _for_chunks(total, lambda start, stop: table[start:stop].fill(-1))
    _for_chunks(
        len(rows),
        lambda start, stop: _bitmap.scatter_inputs(
            start, stop, rows, out_volume, counts, out_keys, offsets, words, ranks, table
        ),
    )
    words[:count] = 0
    _give_back(workspace)
    if geometry.ndim < 4:
        listed = torch.cat((listed[:, :1], listed[:, 5 - geometry.ndim :]), 1)
    return listed, neighbours


def _candidates(
    geometry: Geometry, out_sizes: _Array
) -> tuple[npt.NDArray[np.int32], _Array, npt.NDArray[np.int32]]:
    """Per axis and input coordinate: how many outputs it reaches, their keys and kernel offsets."""
    in_shape = _four_axes(geometry.in_shape, 1)
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
