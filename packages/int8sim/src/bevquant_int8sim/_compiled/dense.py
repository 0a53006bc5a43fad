"""Dense convolutions through the compiled kernels, on the input's own memory.

Outputs whose kernel lies within the input see every offset at fixed distances; those at the border
go through lists of pairs, in which what lies outside is absent. Neither needs a padded copy.

Where the channels of a pixel do not fill the tiles of AMX, those of all pixels that a line of the
kernel sees may: they follow each other in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevquant_int8sim._compiled.channels_last import pixel_rows
from bevquant_int8sim._compiled.dot_product import STEP_CHANNELS
from bevquant_int8sim._compiled.grid import GridPlan, grid_calls, make_plan
from bevquant_int8sim._compiled.launch import Call, RepeatedCalls
from bevquant_int8sim._compiled.packed import PackedWeight, fits_tiles, pack_weight, tile_channels
from bevquant_int8sim._compiled.sparse import sparse_calls
from bevquant_int8sim._grid_axes import Axis, make_grid
from bevquant_int8sim._output import Output
from bevquant_int8sim._prepared import remembered
from bevquant_int8sim._tile_output import Residual
from bevquant_sparse.runtime import workspace
from bevquant_sparse.tiles import SparsePlan, plan_in_order

_LANES = 16


def prepare(
    x: Tensor,
    owner: tuple[Tensor, Hashable],
    shape: tuple[int, int, int, int],
    make: Callable[[], Tensor],
    bias: Tensor | None,
    phases: Sequence[tuple[Axis, ...]],
    kernel: tuple[int, ...],
    output: Output,
    kind: str,
) -> Convolution:
    """What convolves ``[batch, channels, *grid]``; the result is channels-last in memory.

    Of `x` only shape, layout and type matter: int8, or int16 with ``"portable16"``. `make` gives
    the int8 weight of `shape`, ``[groups, volume, in channels, out channels]``, and is called once,
    where `owner` (the tensor that packed weights are kept with, and a view of it) has none packed
    yet.
    """
    groups, _, in_channels, out_channels = shape
    make = functools.cache(make)
    # Channels are added where a kernel's step would read behind the last one.
    pixels = pixel_rows(x, x.shape[1] + -in_channels % STEP_CHANNELS[kind])
    sizes = tuple(axis.out_size for axis in phases[0])
    total = groups * out_channels
    columns = (groups - 1) * out_channels + -(-out_channels // _LANES) * _LANES
    rows = x.shape[0] * int(np.prod(sizes))
    fused, added = output.fused(total), None
    if fused is not None and output.addend is not None:
        added = pixel_rows(output.addend, columns)
        factor = output.addend_multiplier
        sum_of_both = Residual(added, factor, fused.low, fused.high, at_once=True)
        fused = replace(fused, residual=sum_of_both)
    out = workspace.empty((rows, columns), np.int32 if fused is None else np.int8)
    stages: list[list[Call]] = []
    for group in range(groups):
        part = slice(group * out_channels, (group + 1) * out_channels)
        calls: list[Call] = []
        for axes in phases:
            packed = _packed(owner, make, group, axes, kernel, kind)
            line = None
            if kind == "amx" and packed.kind != kind and groups == 1:
                line = _line(axes, packed, pixels.shape[1])
            wide = packed if line is None else _packed(owner, make, group, axes, kernel, kind, line)
            behind = 0 if line is None else line.behind
            whole, border = _plans(x.shape[0], axes, kernel, wide.rows, packed.rows, behind)
            rows = pixels[:, group * in_channels :]
            offset = None if bias is None else bias[part].numpy()
            results = (
                out[:, part.start :],
                None if fused is None else fused.part(part, packed.padded_outputs),
            )
            if whole is not None:
                if line is not None:
                    whole = replace(whole, deltas=whole.deltas[:: line.taps])
                calls += grid_calls(rows, wide, offset, whole, *results)
            if border is not None:
                calls += sparse_calls(rows, packed, offset, border, *results)
        # What a group writes behind its own channels, the next one writes over.
        if group and out_channels % _LANES == 0:
            stages[-1] += calls
        else:
            stages.append(calls)
    batch, height = x.shape[0], len(out) // x.shape[0]
    inner = [int(np.prod(sizes[axis + 1 :])) * columns for axis in range(len(sizes))]
    return Convolution(
        RepeatedCalls.of(stages, pixels, out, added),
        source=Rows(x, pixels.shape[1]),
        added=None if output.addend is None else Rows(output.addend, columns),
        memory=(out.shape, out.dtype),
        shape=(batch, total, *sizes),
        strides=(height * columns, 1, *inner),
        output=None if fused is not None else output,
    )


class Rows:
    """Pixel rows of tensors of one shape and layout: their own memory, or a copy of it.

    Args:
        x: Such a tensor.
        channels: Of a row.

    Attributes:
        own: Whether it is their own memory.
    """

    def __init__(self, x: Tensor, channels: int) -> None:
        self._channels = channels
        self.own = pixel_rows(x, channels).ctypes.data == x.data_ptr()

    def __call__(self, x: Tensor) -> tuple[int, Any]:
        """Their address, and the object that owns the memory."""
        if self.own:
            return x.data_ptr(), x
        rows = pixel_rows(x, self._channels)
        return rows.ctypes.data, rows


@dataclass(frozen=True, eq=False)
class Convolution:
    """A convolution laid out for inputs of one shape and layout."""

    # On the input's rows, the result and the addend's rows.
    calls: RepeatedCalls
    source: Rows
    # Finds the addend's, or ``None``.
    added: Rows | None
    # Shape and type of what is written: rows of pixels.
    memory: tuple[tuple[int, int], Any]
    # ``[batch, channels, *grid]`` of the result.
    shape: tuple[int, ...]
    # Its strides in that memory.
    strides: tuple[int, ...]
    # What is still to be done with accumulators.
    output: Output | None

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """Convolve an input of that shape and layout, and add `addend` as there."""
        out = self.new()
        read = [self.source(x)]
        if self.added is not None and addend is not None:
            read.append(self.added(addend))
        (source, _), *others = read
        self.calls.run([source, out.data_ptr(), *(place for place, _ in others)])
        result = self.seen(out)
        return result if self.output is None else self.output.finish(result, 1)

    @property
    def rows(self) -> tuple[Rows, ...]:
        """Layouts of its input and of its addend, if any."""
        return (self.source,) if self.added is None else (self.source, self.added)

    def new(self) -> Tensor:
        """Memory for the result."""
        return torch.from_numpy(workspace.empty(*self.memory))

    def seen(self, out: Tensor) -> Tensor:
        """The written memory in the result's shape."""
        return out.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class _Line:
    """Kernel elements that see pixels in a row, taken as one with the channels of them all."""

    taps: int
    # Channels of a pixel in memory.
    pixel: int
    # What is read from the first one on; weights of zero meet what lies behind.
    channels: int

    @property
    def behind(self) -> int:
        """Pixels that are read behind the last one seen."""
        return -(-self.channels // self.pixel) - self.taps

    def joined(self, weight: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
        """A weight ``[volume, in channels, out channels]`` with these for its input channels."""
        volume, inputs, outputs = weight.shape
        wide = np.zeros((volume, self.pixel, outputs), np.int8)
        wide[:, :inputs] = weight
        lines = wide.reshape(volume // self.taps, -1, outputs)
        return np.pad(lines, ((0, 0), (0, self.channels - lines.shape[1]), (0, 0)))


def _line(axes: tuple[Axis, ...], packed: PackedWeight, pixel: int) -> _Line | None:
    """The line that fills AMX's tiles where a pixel alone does not, if it fills more than half."""
    if not packed.volume:
        return None
    first, taps = axes[-1].deltas[0], len(axes[-1].deltas)
    if axes[-1].deltas != tuple(range(first, first + taps)):
        taps = 1
    channels = tile_channels(taps * pixel)
    fills = 2 * taps * packed.in_channels > channels
    if fills and fits_tiles(packed.volume // taps, channels, packed.out_channels):
        return _Line(taps, pixel, channels)
    return None


def _packed(
    owner: tuple[Tensor, Hashable],
    make: Callable[[], Tensor],
    group: int,
    axes: tuple[Axis, ...],
    kernel: tuple[int, ...],
    kind: str,
    line: _Line | None = None,
) -> PackedWeight:
    """The elements of the kernel that outputs of these axes see, packed once."""
    taps = np.zeros(1, np.int64)
    for axis, size in zip(axes, kernel, strict=True):
        taps = (taps[:, None] * size + np.array(axis.taps, np.int64)).reshape(-1)
    chosen = torch.from_numpy(taps)

    def pack() -> PackedWeight:
        weight = make()[group].index_select(0, chosen).numpy()
        return pack_weight(weight if line is None else line.joined(weight), kind)

    key = (kind, owner[1], group, tuple(axis.taps for axis in axes), line)
    packed: PackedWeight = remembered(owner[0], key, pack)
    return packed


@functools.lru_cache(maxsize=256)
def _plans(
    batch: int,
    axes: tuple[Axis, ...],
    kernel: tuple[int, ...],
    whole_rows: int,
    border_rows: int,
    behind: int,
) -> tuple[GridPlan | None, SparsePlan | None]:
    """Outputs that see every offset, and those that do not, in tiles of so many rows."""
    grid = make_grid(batch, axes, kernel, behind)
    whole, border = grid.whole, ~grid.whole
    inner = outer = None
    if whole.any():
        inner = make_plan(grid.in_rows[whole], grid.out_rows[whole], grid.deltas, whole_rows)
    if border.any():
        outer = plan_in_order(grid.neighbours, grid.out_rows[border].astype(np.int32), border_rows)
    return inner, outer
