"""The scatter of bytes into a dense grid, on all of torch's threads."""

from __future__ import annotations

import torch
from torch import Tensor

from bevquant_int8sim import _workspace
from bevquant_int8sim._compiled.jit import compiled
from bevquant_int8sim._compiled.sparse_plan import in_chunks

_ROWS = 1024  # of a task
_BYTES = 1 << 20


def scatter(features: Tensor, indices: Tensor, shape: tuple[int, ...], batch_size: int) -> Tensor:
    """int8 ``[batch, y, x, channels, z]`` of checked operands."""
    channels = features.shape[1]
    grid = _workspace.empty((batch_size, *shape[:-1], channels, shape[-1]), "int8")
    flat = grid.reshape(-1)
    in_chunks(lambda first, stop: flat[first:stop].fill(0), flat.size, _BYTES)
    rows, places = features.contiguous().numpy(), indices.contiguous().numpy()
    in_chunks(
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
