"""Element by element: sums and joins of scaled integers, ReLU and its like, tables."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from numbers import Real

import torch
from torch import Tensor

from bevquant_int8sim._quantize import check_arithmetic, quantize, requantize
from bevquant_int8sim._rounding import (
    check_rounding,
    fixed_point_multiplier,
    round_float,
    shift_right,
)
from bevquant_int8sim._scales import along_axis, check_integer_tensor, integer_range, single_scale
from bevquant_sparse.runtime.eager import eager

# Additions and concatenations of tensors that have scales of their own.


@eager
def int8_add(
    a: Tensor,
    b: Tensor,
    multiplier_a: float,
    multiplier_b: float,
    *,
    relu: bool = False,
    narrow_range: bool = False,
    rounding: str = "half_even",
    arithmetic: str = "float64",
    name: str = "int8_add",
) -> Tensor:
    r"""Add tensors of unequal scales, rounding once.

    .. math:: q = \operatorname{clamp}(\operatorname{round}(a M_a + b M_b), q_\min, q_\max), \quad
              M_a = s_a / s_y, \; M_b = s_b / s_y

    ``"float64"``: both products and their sum in float64. ``"fixed_point"``: the multipliers as
    integers over a common power of two, the larger one with 31 bits; the sum is exact in int64 and
    shifted once.

    Args:
        a: int8 or int16.
        b: Of the same type and shape.
        multiplier_a: s_a / s_y, positive.
        multiplier_b: s_b / s_y, positive.
        relu: Clamp at 0 from below.
        narrow_range: Leave out the most negative integer.
        rounding: ``"half_even"``, ``"half_up"`` or ``"half_away"`` (see `quantize`).
        arithmetic: ``"float64"`` or ``"fixed_point"``.
        name: The layer that a message names.

    Returns:
        Of the operands' type and shape.

    Raises:
        TypeError: An operand is neither int8 nor int16.
        ValueError: Types, shapes or devices differ, or a multiplier is unusable.

    Example:
        >>> a, b = torch.tensor([[10, -3], [1, 1]], dtype=torch.int8)
        >>> int8_add(a, b, 1.0, 0.5).tolist()
        [10, -2]
    """
    check_integer_tensor(name, "a", a, (torch.int8, torch.int16))
    check_integer_tensor(name, "b", b, (a.dtype,))
    if a.shape != b.shape or a.device != b.device:
        raise ValueError(
            f"{name}: operands of shape {tuple(a.shape)} on {a.device} and {tuple(b.shape)} on "
            f"{b.device} do not match"
        )
    factors = [
        single_scale(value, f"{name}: multiplier_{which}")
        for which, value in (("a", multiplier_a), ("b", multiplier_b))
    ]
    check_rounding(rounding, f"{name}: rounding")
    multipliers = [torch.tensor(factor, dtype=torch.float64) for factor in factors]
    q = rounded_sum((a, b), multipliers, rounding=rounding, arithmetic=arithmetic, name=name)
    low, high = integer_range(torch.iinfo(a.dtype).bits, narrow_range)
    return q.clamp_(0 if relu else low, high).to(a.dtype)


def rounded_sum(
    operands: Sequence[Tensor],
    factors: Sequence[Tensor],
    axis: int = -1,
    *,
    rounding: str = "half_even",
    arithmetic: str = "float64",
    name: str,
) -> Tensor:
    """``round(Σ q_i · M_i)`` of operands of at most 32 bits, rounded once and not clamped.

    Factors are float64: one number each, or one per entry of `axis`.
    """
    if check_arithmetic(arithmetic, f"{name}: arithmetic") == "float64":
        total = operands[0].double() * along_axis(factors[0], operands[0], axis, name)
        for operand, factor in zip(operands[1:], factors[1:], strict=True):
            total = total + operand.double() * along_axis(factor, operand, axis, name)
        return round_float(total, rounding)
    # All multipliers become mantissas over one power of two, the largest's with 31 bits, or with as
    # many as leave the sum of int32 accumulators within int64.
    wide = any(operand.itemsize > 2 for operand in operands)
    bits = 31 - (len(operands) - 1).bit_length() if wide else 31
    largest = functools.reduce(torch.maximum, factors)
    _, shift = fixed_point_multiplier(largest, bits=bits, name=name)
    whole = torch.zeros((), dtype=torch.int64, device=operands[0].device)
    for operand, factor in zip(operands, factors, strict=True):
        mantissa = _scaled(factor, shift).to(operand.device)
        whole = whole + operand.to(torch.int64) * along_axis(mantissa, operand, axis, name)
    shifts = along_axis(shift.clamp(max=62).to(whole.device), operands[0], axis, name)
    return shift_right(whole, shifts, rounding)


def _scaled(factor: Tensor, shift: Tensor) -> Tensor:
    """``⌊factor · 2^shift + ½⌋``, exact but for the last bit of the factor."""
    values = factor.expand(shift.shape).reshape(-1).tolist()
    pairs = zip(values, shift.reshape(-1).tolist(), strict=True)
    made = [math.floor(math.ldexp(value, power) + 0.5) for value, power in pairs]
    return torch.tensor(made, dtype=torch.int64).reshape(shift.shape)


@eager
def int8_concat(
    tensors: Sequence[Tensor],
    multipliers: Sequence[float],
    axis: int = 1,
    *,
    narrow_range: bool = False,
    rounding: str = "half_even",
    arithmetic: str = "float64",
    name: str = "int8_concat",
) -> Tensor:
    """Concatenate tensors of unequal scales: each is requantized by its s_x / s_y.

    A multiplier of exactly 1 leaves its tensor as it is, −128 included.

    Args:
        tensors: int8 or int16, all of one type.
        multipliers: One positive number for each tensor.
        axis: Axis to join along.
        narrow_range: Leave out the most negative integer where a tensor is requantized.
        rounding: ``"half_even"``, ``"half_up"`` or ``"half_away"`` (see `quantize`).
        arithmetic: ``"float64"`` or ``"fixed_point"`` (see `requantize`).
        name: The layer that a message names.

    Raises:
        TypeError: A tensor is neither int8 nor int16, or types differ.
        ValueError: No tensors, shapes or devices that do not fit, another number of multipliers,
            or an unusable one.

    Example:
        >>> a, b = torch.tensor([[10], [-3]], dtype=torch.int8)
        >>> int8_concat([a, b], [1.0, 0.5], axis=0).tolist()
        [10, -2]
    """
    for what, value in (("tensors", tensors), ("multipliers", multipliers)):
        if not isinstance(value, Sequence):
            raise TypeError(f"{name}: expected a sequence of {what}, got {type(value).__name__}")
    if not tensors or len(tensors) != len(multipliers):
        raise ValueError(
            f"{name}: {len(tensors)} tensors and {len(multipliers)} multipliers; expected as many "
            "of either, and at least one"
        )
    check_rounding(rounding, f"{name}: rounding")
    check_arithmetic(arithmetic, f"{name}: arithmetic")
    first = check_integer_tensor(name, "tensors[0]", tensors[0], (torch.int8, torch.int16))
    if type(axis) is not int or not -first.dim() <= axis < first.dim():
        raise ValueError(f"{name}: axis {axis} does not exist in shape {tuple(first.shape)}")
    parts = []
    for number, (tensor, multiplier) in enumerate(zip(tensors, multipliers, strict=True)):
        check_integer_tensor(name, f"tensors[{number}]", tensor, (first.dtype,))
        if not _joins(first, tensor, axis):
            raise ValueError(
                f"{name}: tensors[{number}] of shape {tuple(tensor.shape)} on {tensor.device} "
                f"cannot be joined along axis {axis} to {tuple(first.shape)} on {first.device}"
            )
        multiplier = single_scale(multiplier, f"{name}: tensors[{number}]: multiplier")
        if multiplier != 1.0:
            tensor = requantize(
                tensor.to(torch.int32),
                multiplier,
                bits=torch.iinfo(first.dtype).bits,
                narrow_range=narrow_range,
                rounding=rounding,
                arithmetic=arithmetic,
                name=f"{name}: tensors[{number}]",
            )
        parts.append(tensor)
    return torch.cat(parts, axis)


def _joins(first: Tensor, tensor: Tensor, axis: int) -> bool:
    """Whether both are on one device and differ in the length of `axis` alone."""
    if first.device != tensor.device or first.dim() != tensor.dim():
        return False
    axis %= first.dim()
    return all(
        m == n or i == axis for i, (m, n) in enumerate(zip(first.shape, tensor.shape, strict=True))
    )


@eager
def int8_relu(
    x: Tensor, multiplier: float = 1.0, *, rounding: str = "half_even", name: str = "int8_relu"
) -> Tensor:
    r""":math:`q = \operatorname{clamp}(\operatorname{round}(\max(x, 0) M), 0, q_\max)`.

    Args:
        x: int8 or int16, any shape; the result is of the same type.
        multiplier: s_x / s_y; 1 where the output keeps its input's scale.
        rounding: ``"half_even"``, ``"half_up"`` or ``"half_away"`` (see `quantize`).
        name: The layer that a message names.

    Raises:
        TypeError: `x` is neither int8 nor int16.
        ValueError: An unusable multiplier or an unknown rounding.

    Example:
        >>> int8_relu(torch.tensor([-5, 3, 100], dtype=torch.int8), 1.5).tolist()
        [0, 4, 127]
    """
    return _rescaled(x, multiplier, 0.0, None, rounding, name)


@eager
def int8_relu6(
    x: Tensor,
    input_scale: float,
    output_scale: float,
    *,
    rounding: str = "half_even",
    name: str = "int8_relu6",
) -> Tensor:
    r""":math:`q = \operatorname{clamp}(\operatorname{round}(\min(\max(x s_x, 0), 6) / s_y))`.

    Args:
        x: int8 or int16, any shape; the result is of the same type.
        input_scale: Value of one step of the input.
        output_scale: Value of one step of the output.
        rounding: ``"half_even"``, ``"half_up"`` or ``"half_away"`` (see `quantize`).
        name: The layer that a message names.

    Raises:
        TypeError: `x` is neither int8 nor int16.
        ValueError: An unusable scale or an unknown rounding.

    Example:
        >>> int8_relu6(torch.tensor([-5, 3, 100], dtype=torch.int8), 0.1, 0.05).tolist()
        [0, 6, 120]
    """
    step = single_scale(output_scale, f"{name}: output_scale")
    multiplier = single_scale(input_scale, f"{name}: input_scale") / step
    return _rescaled(x, multiplier, 0.0, 6.0 / step, rounding, name)


@eager
def int8_leaky_relu(
    x: Tensor,
    negative_slope: float = 0.01,
    multiplier: float = 1.0,
    *,
    rounding: str = "half_even",
    name: str = "int8_leaky_relu",
) -> Tensor:
    r""":math:`q = \operatorname{clamp}(\operatorname{round}(x M))`, below 0 with x·slope for x.

    Args:
        x: int8 or int16, any shape; the result is of the same type.
        negative_slope: Factor of negative inputs, finite.
        multiplier: s_x / s_y.
        rounding: ``"half_even"``, ``"half_up"`` or ``"half_away"`` (see `quantize`).
        name: The layer that a message names.

    Raises:
        TypeError: `x` is neither int8 nor int16.
        ValueError: An unusable multiplier or an unknown rounding.

    Example:
        >>> int8_leaky_relu(torch.tensor([-128, -2, 3], dtype=torch.int8), 0.25).tolist()
        [-32, 0, 3]
    """
    return _rescaled(x, multiplier, negative_slope, None, rounding, name)


def _rescaled(
    x: Tensor, multiplier: float, slope: float, ceiling: float | None, rounding: str, name: str
) -> Tensor:
    check_integer_tensor(name, "x", x, (torch.int8, torch.int16))
    factor = single_scale(multiplier, f"{name}: multiplier")
    check_rounding(rounding, f"{name}: rounding")
    if not isinstance(slope, Real) or not abs(slope) <= sys.float_info.max:
        raise ValueError(f"{name}: negative_slope={slope!r} is no finite number")
    low, high = integer_range(torch.iinfo(x.dtype).bits)
    values = x.to(torch.float64)
    values = torch.where(values < 0, values * (float(slope) * factor), values * factor)
    if ceiling is not None:
        values = values.clamp(max=ceiling)
    return round_float(values, rounding).clamp_(low, high).to(x.dtype)


def lookup_table(
    function: Callable[[Tensor], Tensor],
    input_scale: float,
    output_scale: float,
    *,
    narrow_range: bool = False,
    rounding: str = "half_even",
    name: str = "lookup_table",
) -> Tensor:
    """Tabulate ``quantize(function(q · input_scale), output_scale)`` for q = −128 … 127.

    Args:
        function: Elementwise, float64 to float; evaluated once, on 256 values.
        input_scale: Value of one step of the input.
        output_scale: Value of one step of the output.
        narrow_range: Leave out −128 in the results.
        rounding: ``"half_even"``, ``"half_up"`` or ``"half_away"`` (see `quantize`).
        name: The layer that a message names.

    Returns:
        int8 ``[256]``; entry q + 128 is the result of q.

    Raises:
        ValueError: A scale is unusable, or the function gives NaN or another shape.

    Example:
        >>> table = lookup_table(torch.sigmoid, 0.1, 1 / 128)
        >>> int8_lookup(torch.tensor([-128, 0, 127], dtype=torch.int8), table).tolist()
        [0, 64, 127]
    """
    if not callable(function):
        raise TypeError(f"{name}: expected a function, got {type(function).__name__}")
    step = single_scale(input_scale, f"{name}: input_scale")
    check_rounding(rounding, f"{name}: rounding")
    single_scale(output_scale, f"{name}: output_scale")
    values = function(torch.arange(-128, 128, dtype=torch.float64) * step)
    if not isinstance(values, Tensor) or tuple(values.shape) != (256,):
        raise ValueError(f"{name}: the function must return one value for each of 256")
    if bool(values.isnan().any()):
        place = int(values.isnan().nonzero()[0, 0])
        raise ValueError(
            f"{name}: the function is NaN at {(place - 128) * step}, the value of the integer "
            f"{place - 128}; clamp its argument"
        )
    return quantize(values, output_scale, narrow_range=narrow_range, rounding=rounding, name=name)


@eager
def int8_lookup(x: Tensor, table: Tensor, *, name: str = "int8_lookup") -> Tensor:
    """Replace every integer q by ``table[q + 128]``.

    Args:
        x: int8, any shape.
        table: ``[256]`` of any integer type, from `lookup_table` or elsewhere.
        name: The layer that a message names.

    Returns:
        Shaped as `x`, of the table's type.

    Raises:
        TypeError: `x` is not int8, or the table is not of integers.
        ValueError: The table has another length than 256.
    """
    check_integer_tensor(name, "x", x, (torch.int8,))
    check_integer_tensor(name, "table", table, (torch.int8, torch.int16, torch.int32))
    if tuple(table.shape) != (256,):
        raise ValueError(f"{name}: expected a table of 256 entries, got {tuple(table.shape)}")
    if x.device.type == "cpu":
        # Bytes as they lie in memory name the entries: 0 … 127, then −128 … −1.
        turned = table.roll(128).contiguous().numpy()
        return torch.from_numpy(turned[x.view(torch.uint8).numpy()])
    return table.to(x.device)[x.long() + 128]
