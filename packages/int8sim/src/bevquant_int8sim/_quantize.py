"""Float values to integers and back, and accumulators to the integers of the next layer."""

from __future__ import annotations

import torch
from torch import Tensor

from bevquant_int8sim._rounding import (
    check_rounding,
    fixed_point_multiplier,
    multiply_fixed_point,
    round_float,
)
from bevquant_int8sim._scales import (
    AccumulatorOverflowError,
    along_axis,
    check_integer_tensor,
    checked_scale,
    holding_dtype,
    integer_range,
    single_scale,
)

# From the accumulator to the integers of the next layer.

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


_PIECE = 1 << 20  # values
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def quantize(
    values: Tensor,
    scale: Tensor | float,
    *,
    axis: int = 0,
    bits: int = 8,
    narrow_range: bool = False,
    rounding: str = "half_even",
    name: str = "quantize",
) -> Tensor:
    r"""Quantize symmetrically: the zero point is 0.

    .. math:: q = \operatorname{clamp}(\operatorname{round}(x / s), q_\min, q_\max)

    in float64, rounded before it is clamped. :math:`q_\max = 2^{bits-1} - 1`; :math:`q_\min` is
    :math:`-q_\max - 1`, or :math:`-q_\max` with ``narrow_range``.

    Args:
        values: Float, any shape.
        scale: Value of one integer step: one number, or one per entry of `axis`.
        axis: Axis that a scale per channel runs along.
        bits: 2 to 32.
        narrow_range: Leave out the most negative integer (−127…127 for eight bits).
        rounding: ``"half_even"``, ``"half_up"`` (⌊v + ½⌋) or ``"half_away"`` (from zero, as C's
            ``round``: TensorRT plugins).
        name: The layer that a message names.

    Returns:
        int8, int16 or int32, the smallest that holds `bits`, shaped as `values`.

    Raises:
        TypeError: `values` is no float tensor.
        ValueError: NaN among `values` (infinite ones saturate), or a scale that is zero,
            negative, subnormal or not finite, or does not fit `axis`, or a setting is unknown.

    Example:
        >>> quantize(torch.tensor([0.5, 1.5, -300.0]), 1.0).tolist()
        [0, 2, -128]
        >>> quantize(torch.tensor([0.5, 1.5, -300.0]), 1.0, rounding="half_up").tolist()
        [1, 2, -128]
    """
    _check_float_tensor(name, "values", values)
    check_rounding(rounding, f"{name}: rounding")
    low, high = integer_range(bits, narrow_range, f"{name}: bits")
    divisor = checked_scale(scale, f"{name}: scale")
    divisor = along_axis(divisor, values, axis, f"{name}: scale")
    made = torch.empty_like(values.detach(), dtype=holding_dtype(bits))
    # A piece at a time and in place: memory that is new costs more than the arithmetic.
    pieces = values.numel() // _PIECE if values.device.type == "cpu" else 1
    whole = values.detach(), divisor.expand_as(values), made
    split = (tensor.tensor_split(pieces) if pieces > 1 else (tensor,) for tensor in whole)
    for part, step, integers in zip(*split, strict=True):
        q = part.to(torch.float64, copy=True).div_(step)
        q = q.round_() if rounding == "half_even" else round_float(q, rounding)
        if bool(q.isnan().any()):
            raise ValueError(f"{name}: values contain NaN, which no integer stands for")
        integers.copy_(q.clamp_(low, high))
    return made


def dequantize(
    integers: Tensor,
    scale: Tensor | float,
    *,
    axis: int = 0,
    dtype: torch.dtype = torch.float32,
    name: str = "dequantize",
) -> Tensor:
    """``integers · scale``, in float64 and rounded once to `dtype`.

    Args:
        integers: Any integer type, any shape.
        scale: Value of one integer step: one number, or one per entry of `axis`.
        axis: Axis that a scale per channel runs along.
        dtype: Float type of the result.
        name: The layer that a message names.

    Raises:
        TypeError: `integers` is no integer tensor, or `dtype` no float type.
        ValueError: The scale is zero, negative, subnormal or not finite, or does not fit `axis`.

    Example:
        >>> dequantize(torch.tensor([-2, 3], dtype=torch.int8), 0.5).tolist()
        [-1.0, 1.5]
    """
    check_integer_tensor(name, "integers", integers, _INTEGERS)
    if not dtype.is_floating_point:
        raise TypeError(f"{name}: dtype={dtype}: expected a float type")
    factor = checked_scale(scale, f"{name}: scale")
    factor = along_axis(factor, integers, axis, f"{name}: scale")
    return (integers.to(torch.float64) * factor).to(dtype)


def quantize_bias(
    bias: Tensor, input_scale: Tensor | float, weight_scale: Tensor | float, *, name: str = "bias"
) -> Tensor:
    r"""The bias as the int32 accumulator holds it: :math:`\operatorname{round}(b/(s_x s_w))`.

    In float64, half to even.

    Args:
        bias: Float ``[out_channels]``.
        input_scale: One number.
        weight_scale: One number or one per output channel.
        name: The layer that a message names.

    Raises:
        TypeError: `bias` is no float tensor.
        ValueError: An entry is not finite or leaves int32, or a scale is not usable.

    Example:
        >>> quantize_bias(torch.tensor([0.5, -1.0]), 0.1, torch.tensor([0.1, 0.2])).tolist()
        [50, -50]
    """
    _check_float_tensor(name, "bias", bias)
    if bias.dim() != 1:
        raise ValueError(f"{name}: expected bias [out_channels], got {tuple(bias.shape)}")
    step = checked_scale(weight_scale, f"{name}: weight scale")
    step = step * single_scale(input_scale, f"{name}: input scale")
    step = along_axis(step, bias, 0, f"{name}: weight scale")
    if not bool(bias.isfinite().all()):
        channel = int((~bias.isfinite()).nonzero()[0, 0])
        raise ValueError(f"{name}: bias of channel {channel} is {float(bias[channel])}")
    integers = torch.round(bias.detach().to(torch.float64) / step)
    outside = integers.abs() >= 2.0**31
    if bool(outside.any()):
        channel = int(outside.nonzero()[0, 0])
        value, read = float(bias[channel]), single_scale(input_scale, name)
        held = float(step.expand_as(bias)[channel]) / read
        raise ValueError(
            f"{name}: bias {value} of channel {channel} is {integers[channel]:.3g} steps of its "
            f"accumulator, which leaves int32: with the input scale {read:.3g} its weight scale "
            f"must exceed {abs(value) / 2.0**31 / read:.3g}, and is {held:.3g}. Widen the smaller "
            "of the two ranges (calibrate on the layer's usual input, or set the range of its "
            "weight's quantizer), or keep the layer float"
        )
    return integers.to(torch.int32)


def _check_float_tensor(name: str, what: str, value: object) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        came = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: {what} must be a float tensor, got {came.removeprefix('torch.')}")
