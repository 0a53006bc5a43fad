"""Checks of voxel coordinates: every refusal names the first offending row."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from bevquant_sparse._geometry import Geometry


def require_indices(indices: Tensor, ndim: int) -> Tensor:
    """Return ``indices`` as a contiguous int32 or int64 ``[rows, 1 + ndim]`` tensor.

    Column-major tensors (``mask.nonzero().int()``) are copied to row-major order here, so no
    kernel below ever reads them through the wrong strides.
    """
    if not isinstance(indices, Tensor):
        raise TypeError(f"indices: expected a torch.Tensor, got {type(indices).__name__}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"indices have dtype {indices.dtype}; expected torch.int32 (or int64) voxel "
            "coordinates: convert them with .int()"
        )
    if indices.ndim != 2 or indices.shape[1] != ndim + 1:
        raise ValueError(
            f"indices have shape {tuple(indices.shape)}; expected [rows, {ndim + 1}]: the batch "
            f"index, then {ndim} coordinates for a spatial_shape of {ndim} axes"
        )
    # No call without need: it would be a node of an exported graph, and another tensor there.
    return indices if indices.is_contiguous() else indices.contiguous()


def to_int32(indices: Tensor) -> Tensor:
    """``indices`` as int32: the very tensor where it is."""
    return indices if indices.dtype is torch.int32 else indices.to(torch.int32)


def infer_batch_size(indices: Tensor) -> int:
    """Largest batch index plus one; 1 where there are no rows."""
    return max(int(indices[:, 0].max()) + 1, 1) if indices.shape[0] else 1


def check_range(indices: Tensor, geometry: Geometry) -> None:
    """Refuse coordinates outside the grid; one pass, one synchronisation."""
    if indices.shape[0] == 0:
        return
    low, high = indices.aminmax(dim=0)
    limits = torch.tensor((geometry.batch_size, *geometry.in_shape), device=indices.device)
    if bool(((low < 0) | (high >= limits)).any()):
        refuse_out_of_range(indices, geometry)


def refuse_out_of_range(indices: Tensor, geometry: Geometry) -> NoReturn:
    """Name the first row with a coordinate outside the grid and raise ``ValueError``."""
    limits = torch.tensor((geometry.batch_size, *geometry.in_shape), device=indices.device)
    bad = (indices < 0) | (indices >= limits)
    row = int(bad.any(1).nonzero()[0])
    column = int(bad[row].nonzero()[0])
    value, limit = int(indices[row, column]), int(limits[column])
    place = f"indices[{row}] = {indices[row].tolist()}"
    if column == 0:
        raise ValueError(
            f"{place}: batch index {value} is outside 0…{limit - 1} (batch_size={limit}); pass the "
            "right batch_size or remove the row"
        )
    kind = "negative" if value < 0 else "over range"
    raise ValueError(
        f"{place}: coordinate {value} of spatial axis {column - 1} is {kind}, expected 0…"
        f"{limit - 1} for spatial_shape={geometry.in_shape}; clip the points to the grid or "
        "correct the order of the axes"
    )


def refuse_duplicate(indices: Tensor, first: int, second: int) -> NoReturn:
    """Raise ``ValueError`` naming two equal rows."""
    raise ValueError(
        f"indices[{second}] = {indices[second].tolist()} repeats indices[{first}]: voxel "
        "coordinates must be unique; merge duplicate voxels (mean or max) before the convolution"
    )


def find_duplicate(indices: Tensor) -> tuple[int, int]:
    """First row that repeats an earlier one, and that earlier row: ``(first, second)``."""
    _, inverse = torch.unique(indices, dim=0, return_inverse=True)
    order = torch.argsort(inverse, stable=True)
    grouped = inverse[order]
    repeats = (grouped[1:] == grouped[:-1]).nonzero().flatten()
    second = int(order[repeats + 1].min())
    first = int((inverse == inverse[second]).nonzero()[0])
    return first, second
