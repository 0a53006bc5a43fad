"""Which inputs each output of a dense convolution sees, axis by axis."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
    """A convolution (or pooling): output o sees ``o·stride − padding[0] + k·dilation``.

    Raises:
        ValueError: The kernel does not fit into the padded input.
    """
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

    Raises:
        ValueError: There would be no output.
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
    """Refuse more outputs than a pixel's number, an int32, can tell apart.

    Raises:
        ValueError: There are 2³¹ or more.
    """
    sizes = tuple(sizes)
    if min(sizes) > 0 and math.prod(sizes) >= 2**31:
        raise ValueError(f"{what}: outputs of {sizes} pixels, of which there may be 2**31 - 1")


def per_axis(value: int | Sequence[int], ndim: int, what: str, minimum: int) -> tuple[int, ...]:
    """One integer for every axis, from one or a sequence of them.

    Raises:
        ValueError: A wrong number of entries, or one below `minimum`.
    """
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
    """Padding before and behind every axis, from one integer, one per axis, or one pair per axis.

    Raises:
        ValueError: Something else, or a negative padding.
    """
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
