"""Voxels on one or two axes as a file states them: one cell along each axis that they lack."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["AXES", "lifted", "lowered_to", "three_axes", "with_axes"]

AXES = 3


def three_axes(sizes: tuple[int, ...], fill: int, order: str) -> tuple[int, ...]:
    """Sizes per axis with `fill` for the height that is missing: first in z, y, x, last in x, y, z.

    >>> three_axes((128, 96), 1, "zyx"), three_axes((96, 128), 1, "xyz")
    ((1, 128, 96), (96, 128, 1))
    """
    missing = (fill,) * (AXES - len(sizes))
    return (*missing, *sizes) if order == "zyx" else (*sizes, *missing)


def lifted(coords: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Coordinates ``[rows, 1 + ndim]`` of a model as a file of that grid takes them."""
    missing = AXES + 1 - coords.shape[1]
    if missing <= 0:
        return coords
    zeros = coords.new_zeros(len(coords), missing)
    parts = [coords[:, :1], zeros, coords[:, 1:]] if _first(grid, missing) else [coords, zeros]
    return torch.cat(parts, 1)


def lowered_to(columns: int, coords: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The inverse of `lifted`: coordinates of a file as `columns` of the model."""
    missing = coords.shape[1] - columns
    if missing <= 0:
        return coords
    if _first(grid, missing):
        return torch.cat([coords[:, :1], coords[:, 1 + missing :]], 1)
    return coords[:, :columns]


def with_axes(graph: Any, path: str, coords: str, columns: int, before: int) -> str:
    """As `lifted`, by nodes: int32 coordinates of so many columns, zeros before one of them."""
    missing = AXES + 1 - columns
    if not missing:
        return coords
    places, real = list(range(columns)), [1] * columns
    places[before:before] = real[before:before] = [0] * missing
    coords = graph.node("Gather", path, [coords, graph.numbers(places)], axis=1)
    kept = graph.constant(f"int32_{real}", real, np.int32)
    return str(graph.node("Mul", path, [coords, kept]))


def _first(grid: tuple[int, ...], missing: int) -> bool:
    return all(size == 1 for size in grid[:missing])
