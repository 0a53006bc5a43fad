"""Integer keys of voxel coordinates: linear where int64 holds them, dense ranks beyond."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

KEY_LIMIT = 2**62


def row_major_strides(sizes: tuple[int, ...]) -> list[int]:
    """Row-major strides of a grid with these sizes; the leading size does not matter."""
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return strides


def linear_keys(indices: Tensor, strides: list[int], origin: int = 0) -> Tensor:
    """``indices @ strides + origin`` in int64 (CUDA has no integer matmul)."""
    keys = indices[:, -1].long() + origin
    for column, stride in enumerate(strides[:-1]):
        keys.add_(indices[:, column].long(), alpha=stride)
    return keys


def lexicographic_rank(columns: list[Tensor], sizes: tuple[int, ...]) -> Tensor:
    """Dense rank of each row, exact for any int32 grid.

    Columns are folded one by one: a rank is below the number of rows (< 2³¹) and a coordinate
    below 2³¹, so ``rank · size + coordinate`` stays below 2⁶² whatever the grid's volume.
    """
    rank = columns[0].long()
    for column, size in zip(columns[1:], sizes[1:], strict=True):
        rank = torch.unique(rank * size + column.long(), return_inverse=True)[1]
    return rank


def sort_keys(keys: Tensor) -> Tensor:
    """Sorted copy of ``keys``: on a CPU by numpy, whose sort of plain integers is vectorised."""
    if keys.device.type == "cpu":
        return torch.from_numpy(np.sort(keys.numpy()))
    return torch.sort(keys).values


def sort_with_rows(keys: Tensor, bound: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
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
    merged = sort_keys((keys << bits).bitwise_or_(rows))
    return merged >> bits, merged & ((1 << bits) - 1)
