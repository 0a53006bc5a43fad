"""Values from one order in memory to another, on all threads.

Pixels with their channels side by side from planes of channels, and back; rows of voxels into a
dense grid.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_sparse.runtime import workspace
from bevquant_sparse.runtime.jit import compiled
from bevquant_sparse.runtime.threads import in_parts, share

_SHARE = 1 << 20  # bytes written by a task: below, another thread costs more than it brings
_ROWS = 1024  # of voxels, in a task
_BYTES = 1 << 20  # that a task fills with zeros
_WORD = 4  # bytes of a number
_BLOCK = 64  # pixels, and channels: what a block reads and writes stays in the first cache
_FEW = (
    32  # channels of a task that makes planes: as long a line of memory as there are at the least
)


def pixel_rows(x: Tensor, channels: int) -> Any:
    """``[batch · grid, channels]`` of ``[batch, fewer channels, *grid]``, filled up with zeros.

    The input's own memory where it is laid out like this.
    """
    values, given = x.movedim(1, -1), x.shape[1]
    if given == channels and values.is_contiguous():
        return values.view(-1, channels).numpy()
    rows = workspace.empty((*values.shape[:-1], channels), values.numpy().dtype)
    if x.dtype == torch.int8 and x.is_contiguous() and 0 not in x.shape:
        _transpose_all(x.view(len(x), given, -1).numpy(), rows.reshape(len(x), -1, channels))
    else:
        torch.from_numpy(rows)[..., :given] = values
        rows[..., given:] = 0
    return rows.reshape(-1, channels)


def planes(x: Tensor) -> Tensor:
    """``x.contiguous()``, by blocks where `x` has its channels side by side in memory."""
    rows = x.movedim(1, -1) if x.dim() > 2 else x
    if x.is_contiguous() or 0 in x.shape or not rows.is_contiguous() or x.itemsize not in _WORDS:
        return x.contiguous()
    word, transpose = _WORDS[x.itemsize]
    out = torch.empty(x.shape, dtype=x.dtype)
    channels = x.shape[1]
    given, filled = rows.detach().view(word).numpy(), out.view(word).numpy()
    given, filled = given.reshape(len(x), -1, channels), filled.reshape(len(x), channels, -1)
    tasks = -(-channels // _FEW)

    def run(index: int) -> None:
        b, first = index // tasks, index % tasks * _FEW
        transpose(first, min(first + _FEW, channels), given[b], filled[b])

    share(run, len(x) * tasks)
    return out


def _transpose_all(x: Any, out: Any) -> None:
    size = max(_BLOCK, _SHARE // out.shape[2])
    if out.shape[2] == _WORD and sys.byteorder == "little":  # a pixel is one number
        transpose, x, out = _interleave, x.view(np.uint8), out.view(np.uint32)[..., 0]
    else:
        transpose = _transpose[1]
    tasks = -(-x.shape[2] // size)

    def run(index: int) -> None:
        b, first = index // tasks, index % tasks * size
        transpose(first, min(first + size, x.shape[2]), x[b], out[b])

    share(run, len(x) * tasks)


def _for_sizes(function: Any) -> dict[int, Any]:
    """Decorator: the function compiled for numbers of one and of four bytes."""
    kinds = {1: "int8", 4: "int32"}
    return {
        size: compiled(f"void(int64, int64, {kind}[:, ::1], {kind}[:, ::1])")(function)
        for size, kind in kinds.items()
    }


@_for_sizes
def _transpose(first, stop, x, out):
    given = x.shape[0]
    # Planes whose sizes are multiples of a page would evict each other from the first cache.
    near = np.empty((_BLOCK, _BLOCK), x.dtype)
    for start in range(first, stop, _BLOCK):
        pixels = min(_BLOCK, stop - start)
        for lowest in range(0, given, _BLOCK):
            count = min(_BLOCK, given - lowest)
            for channel in range(count):
                near[channel, :pixels] = x[lowest + channel, start : start + pixels]
            for pixel in range(pixels):
                line = out[start + pixel, lowest : lowest + count]
                for channel in range(count):
                    line[channel] = near[channel, pixel]
        out[start : start + pixels, given:] = 0


_WORDS = {1: (torch.int8, _transpose[1]), 4: (torch.int32, _transpose[4])}
"""Bytes of a number, to what it is moved as and what moves it."""


@compiled("void(int64, int64, uint8[:, ::1], uint32[::1])")
def _interleave(first, stop, x, out):
    pixels = out[first:stop]
    pixels[:] = 0
    for channel in range(x.shape[0]):
        plane, shift = x[channel, first:stop], np.uint32(8 * channel)
        for i in range(len(pixels)):
            pixels[i] |= np.uint32(plane[i]) << shift


def scatter(features: Tensor, indices: Tensor, shape: tuple[int, ...], batch_size: int) -> Tensor:
    """int8 ``[batch, y, x, channels, z]`` of checked operands."""
    channels = features.shape[1]
    grid = workspace.empty((batch_size, *shape[:-1], channels, shape[-1]), "int8")
    flat = grid.reshape(-1)
    in_parts(lambda first, stop: flat[first:stop].fill(0), flat.size, _BYTES)
    rows, places = features.contiguous().numpy(), indices.contiguous().numpy()
    in_parts(
        lambda first, stop: _scatter(first, stop, rows, places, *shape, flat), len(rows), _ROWS
    )
    return torch.from_numpy(grid)


@compiled("void(int64, int64, int8[:, ::1], int32[:, ::1], int64, int64, int64, int8[::1])")
def _scatter(first, stop, rows, places, size1, size2, size3, flat):
    channels = rows.shape[1]
    for row in range(first, stop):
        line = (places[row, 0] * size1 + places[row, 1]) * size2 + places[row, 2]
        start = line * channels * size3 + places[row, 3]
        for channel in range(channels):
            flat[start + channel * size3] = rows[row, channel]
