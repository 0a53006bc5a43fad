"""Weights in the order the kernels read them, and what the kernels need to know of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from bevquant_int8sim._compiled.dot_product import STEP_CHANNELS, input_bytes
from bevquant_int8sim._compiled.ir import LANES
from bevquant_int8sim._compiled.kernels import column_groups, tile_rows

__all__ = ["ColumnGroup", "PackedWeight", "pack_weight"]

_OFFSET = 128  # what is added to the inputs of vpdpbusd


@dataclass(frozen=True, eq=False)
class ColumnGroup:
    """The output channels of one tile: ``first … first + 16·vectors``.

    Attributes:
        weight: ``[volume, steps, vectors, 16, channels of a step]``, int8 or int16.
        offset_init: int32 ``[volume, 16·vectors]``: −128 · Σw of each offset, for inputs that
            get 128 added; ``None`` for others.
    """

    first: int
    vectors: int
    weight: npt.NDArray[Any]
    offset_init: npt.NDArray[np.int32] | None


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A layer's weight for one kind of kernel."""

    kind: str
    volume: int
    in_channels: int
    out_channels: int
    steps: int
    rows: int
    groups: tuple[ColumnGroup, ...]

    @property
    def padded_inputs(self) -> int:
        """Input channels with those added that fill the last step."""
        return self.steps * STEP_CHANNELS[self.kind]

    @property
    def padded_outputs(self) -> int:
        """Output channels with those added that fill the last vector."""
        return -(-self.out_channels // LANES) * LANES

    @property
    def input_dtype(self) -> type:
        """Type in which the kernel reads inputs."""
        return np.int8 if input_bytes(self.kind) == 1 else np.int16

    @cached_property
    def absent(self) -> npt.NDArray[Any]:
        """An input row of zeros."""
        return np.zeros(self.padded_inputs, self.input_dtype)


def pack_weight(weight: npt.NDArray[np.int8], kind: str) -> PackedWeight:
    """Pack a weight ``[volume, in_channels, out_channels]``."""
    volume, in_channels, out_channels = weight.shape
    per_step = STEP_CHANNELS[kind]
    steps, vectors = max(1, -(-in_channels // per_step)), -(-out_channels // LANES)
    wide = np.zeros((volume, steps * per_step, vectors * LANES), np.int8)
    wide[:, :in_channels, :out_channels] = weight
    blocks = wide.reshape(volume, steps, per_step, vectors, LANES).transpose(0, 1, 3, 4, 2)
    sums = wide.sum(1, dtype=np.int32) * -_OFFSET if kind == "vnni" else None
    groups = []
    for first, count in column_groups(vectors):
        part = blocks[:, :, first : first + count]
        columns = slice(first * LANES, (first + count) * LANES)
        init = None if sums is None else np.ascontiguousarray(sums[:, columns])
        dtype = np.int8 if kind == "vnni" else np.int16
        packed = np.ascontiguousarray(part, dtype)
        groups.append(ColumnGroup(first * LANES, count, packed, init))
    return PackedWeight(
        kind, volume, in_channels, out_channels, steps, tile_rows(vectors), tuple(groups)
    )
