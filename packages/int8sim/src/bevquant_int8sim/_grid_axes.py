"""Which inputs each output of a dense convolution sees, axis by axis."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_MOST = 2**31 - 1


@dataclass(frozen=True)
class Axis:
    """Outputs along one axis, and the inputs they see.

    Output j of `count`, at ``first_out + j · out_step`` of `out_size`, sees the input
    ``start + j · step + deltas[i]`` of `size` under the kernel's element ``taps[i]``.
    """

    size: int
    out_size: int
    count: int
    first_out: int
    out_step: int
    start: int
    step: int
    taps: tuple[int, ...]
    deltas: tuple[int, ...]


def conv_axis(
    size: int, kernel: int, stride: int, padding: tuple[int, int], dilation: int, what: str
) -> Axis:
    """A convolution (or pooling): output o sees ``o·stride − padding[0] + k·dilation``."""
    count = (size + sum(padding) - dilation * (kernel - 1) - 1) // stride + 1
    if count < 1:
        raise ValueError(
            f"{what}: a kernel of {kernel} with dilation {dilation} does not fit into {size} inputs"
            f" with padding {padding}"
        )
    deltas = tuple(k * dilation for k in range(kernel))
    return Axis(size, count, count, 0, 1, -padding[0], stride, tuple(range(kernel)), deltas)


def transposed_axis(
    size: int, kernel: int, stride: int, padding: int, output_padding: int, dilation: int, what: str
) -> list[Axis]:
    """A transposed convolution: input i adds to output ``i·stride − padding + k·dilation``.

    The outputs fall into `stride` phases; those of one phase see the same kernel elements at the
    same distances, as in a convolution with stride 1. An element that no output of a phase sees is
    left out; a phase that sees none has empty `taps`.
    """
    out_size = transposed_size(size, kernel, stride, padding, output_padding, dilation)
    if out_size < 1:
        raise ValueError(f"{what}: {size} inputs would give {out_size} outputs along an axis")
    axes = []
    for phase in range(min(stride, out_size)):
        taps = tuple(k for k in range(kernel) if (phase + padding - k * dilation) % stride == 0)
        deltas = tuple((phase + padding - k * dilation) // stride for k in taps)
        count = -(-(out_size - phase) // stride)
        axes.append(Axis(size, out_size, count, phase, stride, 0, 1, taps, deltas))
    return axes


def transposed_size(
    size: int, kernel: int, stride: int, padding: int, output_padding: int, dilation: int
) -> int:
    """Number of outputs of a transposed convolution along an axis; below 1 where there are none."""
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1


def check_outputs(sizes: Iterable[int], what: str) -> None:
    """Refuse more outputs than a pixel's number, an int32, can tell apart."""
    sizes = tuple(sizes)
    if min(sizes) > 0 and math.prod(sizes) >= 2**31:
        raise ValueError(f"{what}: outputs of {sizes} pixels, of which there may be 2**31 - 1")


def per_axis(value: int | Sequence[int], ndim: int, what: str, minimum: int) -> tuple[int, ...]:
    """One integer for every axis, from one or a sequence of them."""
    values = _integers((value,) * ndim if isinstance(value, int) else value)
    if values is None or len(values) != ndim or min(values) < minimum or max(values) > _MOST:
        raise ValueError(
            f"{what}={value!r}: expected one integer or {ndim} of them, at least {minimum} each "
            "and below 2³¹"
        )
    return values


def per_side(
    value: int | Sequence[int] | Sequence[Sequence[int]], ndim: int, what: str
) -> tuple[tuple[int, int], ...]:
    """Padding on both sides of every axis, from one integer, or one or a pair per axis."""
    sides = value if isinstance(value, list | tuple) else (value,) * ndim
    pairs = [_integers((v, v) if isinstance(v, int) else v) or () for v in sides]
    if len(pairs) != ndim or any(len(p) != 2 or min(p) < 0 or max(p) > _MOST for p in pairs):
        raise ValueError(
            f"{what}={value!r}: expected one integer, {ndim} of them, or {ndim} pairs (before, "
            "behind), none negative, all below 2³¹"
        )
    return tuple((p[0], p[1]) for p in pairs)


def _integers(values: Any) -> tuple[int, ...] | None:
    """`values` as integers; ``None`` where they are no sequence of them."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        return None


# A dense convolution as lists of pixels: which ones each output sees, and which see all.


@dataclass(frozen=True, eq=False)
class Grid:
    """Pixel numbers of one phase of a convolution over a batch."""

    # int64 ``[outputs]``: the pixel at the distance 0, which may lie outside.
    in_rows: npt.NDArray[np.int64]
    # int64 ``[outputs]``: the pixel of the output.
    out_rows: npt.NDArray[np.int64]
    # bool ``[outputs]``: every kernel element sees a pixel, as many as asked for follow.
    whole: npt.NDArray[np.bool_]
    # int64 ``[offsets]``: distance to the pixel that each kernel element sees.
    deltas: npt.NDArray[np.int64]
    # int32 ``[outputs that are not whole, offsets]``: the pixels seen, −1 for none.
    neighbours: npt.NDArray[np.int32]
    # int64 ``[offsets]``: number of the kernel element, row-major over its axes.
    taps: npt.NDArray[np.int64]


@functools.lru_cache(maxsize=64)
def make_grid(batch: int, axes: tuple[Axis, ...], kernel: tuple[int, ...], behind: int = 0) -> Grid:
    """The pixels of the outputs that `axes` describe.

    An output is `whole` if in memory so many pixels lie `behind` the last that it sees.
    """
    in_rows = out_rows = np.arange(batch, dtype=np.int64)
    deltas = taps = np.zeros(1, np.int64)
    inside: npt.NDArray[np.bool_] = np.ones((batch, 1), np.bool_)  # [outputs, offsets], by axis
    for axis, size in zip(axes, kernel, strict=True):
        j = np.arange(axis.count)
        starts = axis.start + j * axis.step
        outs = axis.first_out + j * axis.out_step
        steps = np.array(axis.deltas, np.int64)
        seen = starts[:, None] + steps
        fits = (seen >= 0) & (seen < axis.size)
        in_rows = (in_rows[:, None] * axis.size + starts).reshape(-1)
        out_rows = (out_rows[:, None] * axis.out_size + outs).reshape(-1)
        deltas = (deltas[:, None] * axis.size + steps).reshape(-1)
        taps = (taps[:, None] * size + np.array(axis.taps, np.int64)).reshape(-1)
        joined = inside[:, None, :, None] & fits[None, :, None, :]
        inside = joined.reshape(len(in_rows), len(deltas))
    whole = np.asarray(inside.all(1))
    if behind and len(deltas):
        pixels = batch * math.prod(axis.size for axis in axes)
        whole &= in_rows + deltas.max() + behind < pixels
    partly = in_rows[~whole, None] + deltas
    neighbours = np.where(inside[~whole], partly, -1).astype(np.int32)
    return Grid(in_rows, out_rows, whole, deltas, neighbours, taps)
