"""The plugin's limits, its integers of filters, and a file for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bevquant_export._differences import TensorDifference
from bevquant_export.sparse._graph import Graph

DOMAIN = "autoware"
MOST_VOXELS = 256_000  # compiled into the plugin, as the rows that a pair generation may make
SLOTS = ("out_indices", "pair_fwd", "pair_mask", "mask_argsort")


@dataclass(frozen=True, eq=False)
class AutowareFile:
    """A file for Autoware's plugin.

    Attributes:
        path: The file.
        precision: ``"int8"`` or ``"fp16"``.
        fused: Whether bias and ReLU are inside the convolutions.
        layers: Node to the module that it comes from and ``"int8"`` or ``"fp16"``.
        pair_generations: Number in the file, and number with one for each layer.
        voxel_bound: Largest number of voxels of a layer on the given frames, with head room.
        permutation: Column of ``coors`` (z, y, x) that each column of the encoder comes from.
        graph: The graph before the choice of operators, for comparisons.
        outputs: Names of the encoder's outputs.
        tensors: Tensor of `graph` to its name in the file.
        coords: Tensor of `graph` to the tensor of the file that has its voxels.
        differences: From `compare_autoware_onnx` on the example inputs; empty without `verify`.
    """

    path: Path
    precision: str
    fused: bool
    layers: Mapping[str, tuple[str, str]]
    pair_generations: tuple[int, int]
    voxel_bound: int
    permutation: tuple[int, ...]
    outputs: tuple[str, ...]
    graph: Graph
    tensors: Mapping[str, str]
    coords: Mapping[str, str]
    differences: tuple[TensorDifference, ...] = ()

    @property
    def floats(self) -> tuple[str, ...]:
        """Layers in float."""
        return tuple(f"{path}: fp16" for path, form in self.layers.values() if form != "int8")

    @property
    def notes(self) -> tuple[str, ...]:
        """The number of pair generations."""
        once, alone = self.pair_generations
        return (f"{once} pair generations for {alone} layers",)


def quantized_weight(
    half: np.ndarray[Any, Any], channel_scale: np.ndarray[Any, Any], input_scale: float
) -> np.ndarray[Any, Any]:
    """Integers that the plugin makes of float16 filters: roundf(w · (1/s_w)), in float32.

    s_w is ``channel_scale / input_scale``, as the plugin computes it back.
    """
    one = np.float32(1)
    scale = channel_scale.astype(np.float32) / np.float32(input_scale)
    inverse = (one / scale).reshape(-1, *[1] * (half.ndim - 1))
    value = half.astype(np.float32) * inverse
    whole = np.trunc(value)
    rounded = whole + (np.abs(value - whole) >= np.float32(0.5)) * np.sign(value)
    integers: np.ndarray[Any, Any] = np.clip(rounded, -128, 127).astype(np.int8)
    return integers
