"""Pooling and resizing of integers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bevquant_int8sim._backends import compiled_module
from bevquant_int8sim._grid_axes import check_outputs, per_axis
from bevquant_int8sim._rounding import check_rounding, round_float
from bevquant_int8sim._scales import (
    check_accumulators,
    check_integer_tensor,
    integer_range,
    proves_safe,
    single_scale,
)
from bevquant_sparse.runtime.eager import eager

# Nearest and bilinear resizing of integers.

_AT_ONCE = 1 << 18  # values of the result


@eager
def int8_resize(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    *,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool = False,
    multiplier: float = 1.0,
    rounding: str = "half_even",
    name: str = "int8_resize",
) -> Tensor:
    r"""Resize the last two axes, as ``torch.nn.functional.interpolate`` on integers.

    ``"nearest"``: output o takes input ⌊o·step⌋. ``"bilinear"``: four inputs, their weights in
    float64, multiplied by the multiplier and rounded once.

    Coordinates: step = in / out, or 1 / scale_factor where that is given, as in torch; bilinear
    coordinates are (o + ½)·step − ½ (not below 0), or o·(in − 1)/(out − 1) with `align_corners`.

    Args:
        x: int8 or int16 ``[batch, channels, height, width]``.
        size: Height and width of the output.
        scale_factor: Output size over input size, rounded down; instead of `size`.
        mode: ``"nearest"`` or ``"bilinear"``.
        align_corners: Bilinear: the outermost pixels' centres stay where they are.
        multiplier: Bilinear: s_x / s_y. Nearest keeps the scale.
        rounding: Bilinear: ``"half_even"``, ``"half_up"`` or ``"half_away"``.
        name: The layer that a message names.

    Raises:
        TypeError: `x` is neither int8 nor int16.
        ValueError: A setting does not fit.

    Example:
        >>> x = torch.tensor([[[[0, 100]]]], dtype=torch.int8)
        >>> int8_resize(x, (1, 4)).tolist()
        [[[[0, 0, 100, 100]]]]
        >>> int8_resize(x, (1, 4), mode="bilinear").tolist()
        [[[[0, 25, 75, 100]]]]
    """
    check_integer_tensor(name, "x", x, (torch.int8, torch.int16))
    check_rounding(rounding, f"{name}: rounding")
    if x.dim() != 4:
        raise ValueError(f"{name}: expected [batch, channels, height, width], got {x.dim()} axes")
    if mode not in ("nearest", "bilinear"):
        raise ValueError(f"{name}: mode={mode!r}: expected 'nearest' or 'bilinear'")
    if 0 in x.shape[2:]:
        raise ValueError(f"{name}: there is nothing to resize in shape {tuple(x.shape)}")
    factor = single_scale(multiplier, f"{name}: multiplier")
    sizes, steps = _sizes(x, size, scale_factor, name)
    check_outputs((len(x), *sizes), name)
    if mode == "nearest":
        if factor != 1.0:
            raise ValueError(
                f"{name}: nearest resizing keeps the scale, multiplier={factor} does not; call "
                "requantize() before it"
            )
        # Never past the last pixel: (out − 1) · step < n, with room for float64's rounding.
        taken = x.movedim(1, -1)  # whole pixels, which in the kernels' own layout are lines
        for axis, (out, step) in enumerate(zip(sizes, steps, strict=True), start=1):
            places = (torch.arange(out, dtype=torch.float64) * step).floor().long()
            taken = taken.index_select(axis, places.to(x.device))
        return taken.movedim(-1, 1)
    axes = [
        _between(n, out, step, align_corners)
        for n, out, step in zip(x.shape[2:], sizes, steps, strict=True)
    ]
    plain = x.dtype == torch.int8 and x.device.type == "cpu" and rounding == "half_even"
    fast = compiled_module("resize", math.prod((*x.shape[:2], *sizes))) if plain else None
    if fast is not None:
        made: Tensor = fast.bilinear(x, *axes, factor)
        return made
    low, high = integer_range(torch.iinfo(x.dtype).bits)
    made = x.new_empty(*x.shape[:2], *sizes)
    at_once = max(1, _AT_ONCE // math.prod(sizes))  # float64 takes eight times the integers' room
    for planes, results in zip(
        x.flatten(0, 1).split(at_once), made.flatten(0, 1).split(at_once), strict=True
    ):
        values = planes.double()
        for axis, between in enumerate(axes, start=1):
            values = _along(values, axis, *between)
        results.copy_(round_float(values * factor, rounding).clamp_(low, high))
    return made


def _between(n: int, out: int, step: float, align_corners: bool) -> tuple[Tensor, Tensor, Tensor]:
    """For each output of an axis the two inputs that it lies between, and the second's weight."""
    places = torch.arange(out, dtype=torch.float64)
    if align_corners:
        places = places * ((n - 1) / (out - 1) if out > 1 else 0.0)
    else:
        places = ((places + 0.5) * step - 0.5).clamp(min=0.0)
    first = places.floor().long().clamp(max=n - 1)
    return first, (first + 1).clamp(max=n - 1), (places - first).clamp(0.0, 1.0)


def _along(values: Tensor, axis: int, first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
    """Interpolate linearly along one axis."""
    shape = [1] * values.dim()
    shape[axis] = len(weight)
    share = weight.view(shape).to(values.device)
    low, high = (values.index_select(axis, at.to(values.device)) for at in (first, second))
    return low * (1 - share) + high * share


def _sizes(
    x: Tensor,
    size: int | Sequence[int] | None,
    scale_factor: float | Sequence[float] | None,
    name: str,
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Output sizes, and input pixels per output pixel."""
    if (size is None) == (scale_factor is None):
        raise ValueError(f"{name}: give either size or scale_factor")
    if size is not None:
        sizes = per_axis(size, 2, f"{name}: size", 1)
        return sizes, tuple(n / out for n, out in zip(x.shape[2:], sizes, strict=True))
    assert scale_factor is not None
    given = scale_factor if isinstance(scale_factor, list | tuple) else (scale_factor,) * 2
    try:
        factors = tuple(float(f) for f in given)
    except (TypeError, ValueError, OverflowError):
        factors = ()
    if len(factors) != 2 or not all(0 < f < math.inf for f in factors):
        raise ValueError(f"{name}: scale_factor={scale_factor}: expected one or two positive ones")
    sizes = tuple(int(n * factor) for n, factor in zip(x.shape[2:], factors, strict=True))
    return per_axis(sizes, 2, f"{name}: output size", 1), tuple(1 / f for f in factors)


Ints = int | Sequence[int]


@eager
def int8_max_pool(
    x: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    *,
    ceil_mode: bool = False,
    name: str = "int8_max_pool",
) -> Tensor:
    """Maximum over windows, as ``torch.nn.functional.max_pool1d/2d/3d``: exact, scale unchanged.

    Args:
        x: int8 or int16 ``[batch, channels, *grid]``, one to three grid axes.
        kernel_size: One integer or one per axis, as all that follow.
        stride: ``None`` for the kernel's size.
        padding: At every side; never the maximum. At most half the kernel.
        dilation: Distance of a window's elements.
        ceil_mode: Let the last window hang over, as long as it starts inside.
        name: The layer that a message names.

    Raises:
        TypeError: `x` is neither int8 nor int16.
        ValueError: A setting does not fit.

    Example:
        >>> x = torch.arange(-8, 8, dtype=torch.int8).view(1, 1, 4, 4)
        >>> int8_max_pool(x, 2).tolist()
        [[[[-3, -1], [5, 7]]]]
    """
    lowest = torch.iinfo(check_integer_tensor(name, "x", x, (torch.int8, torch.int16)).dtype).min
    windows = _Windows(x, kernel_size, stride, padding, dilation, ceil_mode, name)
    fast = _compiled_pool(x)
    if fast is not None:
        return windows.pair(fast, x)
    return windows.reduce(x, lowest, torch.maximum)


@eager
def int8_avg_pool(
    x: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    multiplier: float = 1.0,
    *,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    rounding: str = "half_even",
    name: str = "int8_avg_pool",
) -> Tensor:
    r"""Average over windows of n inputs.

    .. math:: q = \operatorname{clamp}(\operatorname{round}((\textstyle\sum x)\, M / n))

    The sum is exact in int32, or refused; ``Σx·M`` and the division by n are taken in float64, in
    this order. With M = 1 ties are therefore exact.

    Args:
        x: int8 or int16 ``[batch, channels, *grid]``, one to three grid axes.
        kernel_size: One integer or one per axis, as all that follow.
        stride: ``None`` for the kernel's size.
        padding: Zeros at every side. At most half the kernel.
        multiplier: s_x / s_y.
        ceil_mode: Let the last window hang over, as long as it starts inside.
        count_include_pad: n counts the padding too, but never what hangs over it.
        rounding: ``"half_even"``, ``"half_up"`` or ``"half_away"`` (see `quantize`).
        name: The layer that a message names.

    Raises:
        TypeError: `x` is neither int8 nor int16.
        ValueError: A setting does not fit, or the multiplier is unusable.
        AccumulatorOverflowError: A sum leaves int32.

    Example:
        >>> x = torch.tensor([[[1, 2, 3, 4]]], dtype=torch.int8)
        >>> int8_avg_pool(x, 2).tolist(), int8_avg_pool(x, 2, rounding="half_up").tolist()
        ([[[2, 4]]], [[[2, 4]]])
    """
    check_integer_tensor(name, "x", x, (torch.int8, torch.int16))
    check_rounding(rounding, f"{name}: rounding")
    factor = single_scale(multiplier, f"{name}: multiplier")
    windows = _Windows(x, kernel_size, stride, padding, 1, ceil_mode, name)
    fits = proves_safe(-torch.iinfo(x.dtype).min * math.prod(windows.kernel))
    total = windows.reduce(x.to(torch.int32 if fits else torch.int64), 0, torch.add)
    if not fits:
        check_accumulators(total, name, 1, "pool in two steps")
    counts = windows.counts(count_include_pad).to(x.device)
    low, high = integer_range(torch.iinfo(x.dtype).bits)
    q = round_float(total.double() * factor / counts, rounding)
    return q.clamp_(low, high).to(x.dtype)


def _compiled_pool(x: Tensor) -> Callable[..., Tensor] | None:
    """The compiled kernel, if there is one and `x` is large enough for it."""
    if x.dtype != torch.int8 or x.device.type != "cpu" or x.dim() != 4:
        return None
    return getattr(compiled_module("pool", x.numel()), "max_pool", None)


class _Windows:
    """The windows of a pooling: their number along each axis, and their inputs."""

    def __init__(
        self,
        x: Tensor,
        kernel_size: Ints,
        stride: Ints | None,
        padding: Ints,
        dilation: Ints,
        ceil_mode: bool,
        name: str,
    ) -> None:
        ndim = x.dim() - 2
        if not 1 <= ndim <= 3:
            raise ValueError(f"{name}: expected [batch, channels, 1 to 3 axes], got {x.dim()} axes")
        self.sizes = tuple(x.shape[2:])
        self.kernel = per_axis(kernel_size, ndim, f"{name}: kernel_size", 1)
        self.stride = per_axis(
            self.kernel if stride is None else stride, ndim, f"{name}: stride", 1
        )
        self.padding = per_axis(padding, ndim, f"{name}: padding", 0)
        self.dilation = per_axis(dilation, ndim, f"{name}: dilation", 1)
        if any(2 * p > k for p, k in zip(self.padding, self.kernel, strict=True)):
            raise ValueError(
                f"{name}: padding={self.padding} is more than half of kernel_size={self.kernel}"
            )
        self.windows: list[int] = []
        axes = zip(self.sizes, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        for size, k, s, p, d in axes:
            room = size + 2 * p - d * (k - 1) - 1
            count = (-(-room // s) if ceil_mode else room // s) + 1
            # As in torch, no window begins in the padding behind.
            if ceil_mode and (count - 1) * s >= size + p:
                count -= 1
            if count < 1:
                raise ValueError(f"{name}: a window of {k} does not fit into {size} inputs")
            self.windows.append(count)

    def pair(self, pool: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Result of `pool` for windows over two axes."""
        settings = (self.windows, self.kernel, self.stride, self.padding, self.dilation)
        return pool(x, *(tuple(values) for values in settings))

    def reduce(self, x: Tensor, fill: int, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Join the windows' elements one kernel element after the other; `fill` lies outside."""
        sides: list[int] = []
        for axis in reversed(range(len(self.sizes))):
            reach = (self.windows[axis] - 1) * self.stride[axis]
            reach += (self.kernel[axis] - 1) * self.dilation[axis] + 1
            behind = max(0, reach - self.sizes[axis] - self.padding[axis])
            sides += [self.padding[axis], behind]
        padded = torch.nn.functional.pad(x, sides, value=fill)
        shape = (*x.shape[:2], *self.windows)
        total = torch.full(shape, fill, dtype=x.dtype, device=x.device)
        for taps in itertools.product(*map(range, self.kernel)):
            places: list[slice] = [slice(None), slice(None)]
            for tap, d, s, count in zip(
                taps, self.dilation, self.stride, self.windows, strict=True
            ):
                places.append(slice(tap * d, tap * d + (count - 1) * s + 1, s))
            total = join(total, padded[tuple(places)])
        return total

    def counts(self, include_padding: bool) -> Tensor:
        """Number of inputs of each window, ``[*windows]``."""
        counts = torch.ones((), dtype=torch.float64)
        axes = zip(self.sizes, self.kernel, self.stride, self.padding, self.windows, strict=True)
        for size, k, s, p, count in axes:
            first = torch.arange(count) * s - p
            last = torch.clamp(first + k, max=size + p)
            if not include_padding:
                first, last = first.clamp(min=0), last.clamp(max=size)
            counts = counts.unsqueeze(-1) * (last - first).double()
        return counts
