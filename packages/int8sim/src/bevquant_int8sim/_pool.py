"""Maximum and average pooling of integers over one to three axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bevquant_int8sim._backends import compiled_module
from bevquant_int8sim._grid_axes import per_axis
from bevquant_int8sim._rounding import check_rounding, round_float
from bevquant_int8sim._scales import (
    check_accumulators,
    check_integer_tensor,
    integer_range,
    proves_safe,
    single_scale,
)

Ints = int | Sequence[int]


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
