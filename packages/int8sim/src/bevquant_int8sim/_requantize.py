"""From the accumulator to the integers of the next layer."""

from __future__ import annotations

import torch
from torch import Tensor

from bevquant_int8sim._accumulator import AccumulatorOverflowError
from bevquant_int8sim._fixed_point import fixed_point_multiplier, multiply_fixed_point
from bevquant_int8sim._integers import check_integer_tensor, holding_dtype, integer_range
from bevquant_int8sim._rounding import check_rounding, round_float
from bevquant_int8sim._scales import along_axis, checked_scale

ARITHMETICS = ("float64", "fixed_point")


def check_arithmetic(arithmetic: str, what: str = "arithmetic") -> str:
    """Return `arithmetic`, or refuse other values than ``"float64"`` and ``"fixed_point"``."""
    if arithmetic not in ARITHMETICS:
        raise ValueError(f"{what}={arithmetic!r}: expected 'float64' or 'fixed_point'")
    return arithmetic


def requantize(
    acc: Tensor,
    multiplier: Tensor | float,
    *,
    axis: int = -1,
    rounding: str = "half_even",
    arithmetic: str = "float64",
    multiplier_bits: int = 31,
    bits: int = 8,
    narrow_range: bool = False,
    relu: bool = False,
    name: str = "requantize",
) -> Tensor:
    r"""Rescale accumulators to integers of the output's scale.

    .. math:: q = \operatorname{clamp}(\operatorname{round}(acc \cdot M), q_\min, q_\max),
              \quad M = s_x s_w / s_y

    ``arithmetic="float64"``: the product is taken in float64, whose own rounding is half to even,
    and then rounded to an integer. ``arithmetic="fixed_point"``: M becomes an integer mantissa and
    a right shift (`fixed_point_multiplier`), the product is exact in 64 bits and is rounded once.

    Args:
        acc: int32, or int64 with values within int32; any shape.
        multiplier: Positive, one number or one per entry of `axis`.
        axis: Axis that multipliers per channel run along.
        rounding: ``"half_even"``, ``"half_up"`` (⌊v + ½⌋, so −2.5 → −2) or ``"half_away"`` (from
            zero, −2.5 → −3; the compiled kernels hand such roundings to torch).
        arithmetic: ``"float64"`` or ``"fixed_point"``.
        multiplier_bits: Bits of the mantissa of the fixed-point multiplier.
        bits: Bits of the output, 2 to 32.
        narrow_range: Leave out the most negative integer.
        relu: Clamp at 0 from below.
        name: The layer that a message names.

    Returns:
        int8, int16 or int32, the smallest that holds `bits`, shaped as `acc`.

    Raises:
        TypeError: `acc` is no integer tensor.
        ValueError: A multiplier is unusable or does not fit `axis`, or a setting is unknown.
        AccumulatorOverflowError: `acc` leaves int32.

    Example:
        >>> acc = torch.tensor([[1, 3], [-1, -100000]], dtype=torch.int32)
        >>> requantize(acc, 0.5).tolist()
        [[0, 2], [0, -128]]
        >>> requantize(acc, torch.tensor([0.5, 0.001]), rounding="half_up").tolist()
        [[1, 0], [0, -100]]
    """
    check_integer_tensor(name, "acc", acc, (torch.int32, torch.int64))
    check_rounding(rounding, f"{name}: rounding")
    if acc.dtype == torch.int64 and acc.numel():
        low_acc, high_acc = int(acc.min()), int(acc.max())
        if low_acc < -(2**31) or high_acc >= 2**31:
            raise AccumulatorOverflowError(
                f"{name}: accumulators of {low_acc} … {high_acc} leave int32"
            )
    low, high = integer_range(bits, narrow_range, f"{name}: bits")
    factor = checked_scale(multiplier, f"{name}: multiplier")
    if check_arithmetic(arithmetic, f"{name}: arithmetic") == "fixed_point":
        mantissa, shift = fixed_point_multiplier(factor, bits=multiplier_bits, name=name)
        q = multiply_fixed_point(
            acc,
            along_axis(mantissa, acc, axis, f"{name}: multiplier"),
            along_axis(shift, acc, axis, f"{name}: multiplier"),
            rounding,
        )
    else:
        factor = along_axis(factor, acc, axis, f"{name}: multiplier")
        q = round_float(acc.to(torch.float64) * factor, rounding)
    return q.clamp_(0 if relu else low, high).to(holding_dtype(bits))
