"""What a sparse convolution or pooling reads of the voxels, and their coordinates' columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bevquant_int8sim.model import Geometry
from bevquant_sparse import build_rulebook

Sizes = tuple[int, ...]
AXES = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class Window:
    """The voxels that a sparse convolution or pooling reads; sizes are in the file's axes."""

    kernel_size: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    subm: bool  # Submanifold
    rulebook: str  # Key under which convolutions share their pairs; may be empty
    inverse: bool = False  # Inverse of the strided convolution with the same rulebook
    name: str = ""  # Name of the node

    @property
    def keeps_voxels(self) -> bool:
        """Submanifold, or 1×1×1 of stride 1 without padding, which moves nothing: rows stay."""
        still = self.kernel_size == self.stride == (1, 1, 1) and not any(self.padding)
        return self.subm or still

    @property
    def geometry(self) -> Geometry:
        """Parameters that determine the pairs on a set of voxels."""
        sizes = (self.kernel_size, self.stride, self.padding, self.dilation)
        return Geometry(*sizes, (0, 0, 0), self.keeps_voxels, False, self.inverse)

    def output_on(self, grid: Sizes) -> tuple[Sizes, Sizes]:
        """Padding and grid of the output: those of the rulebook, which checks them too."""
        nothing, sizes = torch.zeros(0, 4, dtype=torch.int32), self.geometry.numbers()[:4]
        try:
            rulebook = build_rulebook(nothing, grid, *sizes, subm=self.keeps_voxels, batch_size=1)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        return tuple(rulebook.padding), tuple(rulebook.out_shape)


def with_axes(graph: Any, path: str, coords: str, columns: int, before: int) -> str:
    """Nodes that put zeros for the missing columns of int32 coordinates at `before`."""
    missing = AXES + 1 - columns
    if not missing:
        return coords
    places, real = list(range(columns)), [1] * columns
    places[before:before] = real[before:before] = [0] * missing
    coords = graph.node("Gather", path, [coords, graph.numbers(places)], axis=1)
    kept = graph.constant(f"int32_{real}", real, np.int32)
    return str(graph.node("Mul", path, [coords, kept]))
