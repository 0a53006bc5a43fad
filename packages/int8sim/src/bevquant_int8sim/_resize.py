"""Nearest and bilinear resizing of integers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bevquant_int8sim._backends import compiled_module
from bevquant_int8sim._grid_axes import check_outputs, per_axis
from bevquant_int8sim._rounding import check_rounding, round_float
from bevquant_int8sim._scales import check_integer_tensor, integer_range, single_scale

_AT_ONCE = 1 << 18  # values of the result


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
