"""Weights in the order of the kernels, and other data of a layer for the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bevquant_int8sim._compiled import amx_loops
from bevquant_int8sim._compiled.dot_product import STEP_CHANNELS, input_bytes
from bevquant_int8sim._compiled.ir import LANES
from bevquant_int8sim._compiled.kernels import column_groups, tile_rows
from bevquant_int8sim._compiled.tile_instructions import TILE_BYTES, TILE_ROWS, configuration

_LARGE = 1 << 20  # values
_OFFSET = 128  # what is added to the inputs of vpdpbusd


@dataclass(frozen=True, eq=False)
class ColumnGroup:
    """The output channels of one tile: ``first … first + 16·vectors``."""

    first: int
    vectors: int
    # ``[volume, steps, vectors, 16, channels of a step]``, int8 or int16; of AMX ``[volume, pairs
    # of vectors, steps, channels of a step / 4, 32, 4]``, int8.
    weight: npt.NDArray[Any]
    # int32 ``[volume, 16·vectors]``: −128 · Σw of each offset, for inputs that get 128 added;
    # ``None`` for others.
    offset_init: npt.NDArray[np.int32] | None


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A layer's weight for one kind of kernel."""

    # Of the kernel; a layer whose shape is of no use for AMX has ``"vnni"``.
    kind: str
    volume: int
    in_channels: int
    out_channels: int
    # Steps of an input row.
    steps: int
    rows: int
    groups: tuple[ColumnGroup, ...]
    # Input channels of a step.
    step_channels: int

    @property
    def padded_inputs(self) -> int:
        """Input channels with those added that fill the last step."""
        return self.steps * self.step_channels

    @property
    def padded_outputs(self) -> int:
        """Output channels with those added that fill the last vector."""
        return -(-self.out_channels // LANES) * LANES

    @property
    def input_dtype(self) -> type:
        """Type in which the kernel reads inputs."""
        return np.int8 if input_bytes(self.kind) == 1 else np.int16

    @cached_property
    def tiles(self) -> npt.NDArray[np.uint8]:
        """The configuration of AMX's tiles: four of sums, two of inputs, two of weights."""
        inputs, weights = (TILE_ROWS, self.step_channels), (self.step_channels // 4, TILE_BYTES)
        return configuration([(TILE_ROWS, TILE_BYTES)] * 4 + [inputs] * 2 + [weights] * 2)

    @cached_property
    def absent(self) -> npt.NDArray[Any]:
        """An input row of zeros."""
        return np.zeros(self.padded_inputs, self.input_dtype)


def pack_weight(weight: npt.NDArray[np.int8], kind: str) -> PackedWeight:
    """Pack a weight ``[volume, in_channels, out_channels]``."""
    volume, in_channels, out_channels = weight.shape
    if kind == "amx":
        if fits_tiles(volume, in_channels, out_channels):
            return _pack_tiles(weight)
        kind = "vnni"
    per_step = STEP_CHANNELS[kind]
    steps, vectors = max(1, -(-in_channels // per_step)), -(-out_channels // LANES)
    wide = np.zeros((volume, steps * per_step, vectors * LANES), np.int8)
    wide[:, :in_channels, :out_channels] = _laid_out(weight, np.int8)
    blocks = wide.reshape(volume, steps, per_step, vectors, LANES).transpose(0, 1, 3, 4, 2)
    sums = wide.sum(1, dtype=np.int32) * -_OFFSET if kind == "vnni" else None
    groups = []
    for first, count in column_groups(vectors):
        part = blocks[:, :, first : first + count]
        columns = slice(first * LANES, (first + count) * LANES)
        init = None if sums is None else np.ascontiguousarray(sums[:, columns])
        packed = _laid_out(part, np.int8 if kind == "vnni" else np.int16)
        groups.append(ColumnGroup(first * LANES, count, packed, init))
    return PackedWeight(
        kind, volume, in_channels, out_channels, steps, tile_rows(vectors), tuple(groups), per_step
    )


def _laid_out(view: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A view in the order of its axes: large ones by torch, in a sixth of numpy's time."""
    # Not small ones, which the self-test of kernels has in a process of its own, where torch's
    # threads are not.
    if view.size >= _LARGE:
        view = torch.from_numpy(view).contiguous().numpy()
    return np.ascontiguousarray(view, dtype)


def tile_channels(channels: int) -> int:
    """The fewest input channels, but not fewer, that fill one step of 32 or steps of 64."""
    half = TILE_BYTES // 2
    return half if channels <= half else -(-channels // TILE_BYTES) * TILE_BYTES


def fits_tiles(volume: int, in_channels: int, out_channels: int) -> bool:
    """Whether whole tiles hold the layer: nothing is padded, and a tile's inputs fit the block."""
    steps_fit = in_channels > 0 and in_channels == tile_channels(in_channels)
    rows_fit = volume * amx_loops.ROWS * in_channels <= amx_loops.BLOCK
    return steps_fit and rows_fit and out_channels > 0 and out_channels % amx_loops.COLUMNS == 0


def _pack_tiles(weight: npt.NDArray[np.int8]) -> PackedWeight:
    volume, in_channels, out_channels = weight.shape
    step = min(in_channels, TILE_BYTES)
    steps, pairs = in_channels // step, out_channels // amx_loops.COLUMNS
    blocks = weight.reshape(volume, steps, step // 4, 4, pairs, amx_loops.COLUMNS)
    packed = _laid_out(blocks.transpose(0, 4, 1, 2, 5, 3), np.int8)
    group = ColumnGroup(0, out_channels // LANES, packed, None)
    rows = amx_loops.ROWS
    return PackedWeight("amx", volume, in_channels, out_channels, steps, rows, (group,), step)
