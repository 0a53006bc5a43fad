"""ReLU, ReLU6 and LeakyReLU on integers, with a change of scale on the way."""

from __future__ import annotations

import sys
from numbers import Real

import torch
from torch import Tensor

from bevquant_int8sim._integers import check_integer_tensor, integer_range
from bevquant_int8sim._rounding import check_rounding, round_float
from bevquant_int8sim._scales import single_scale


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
