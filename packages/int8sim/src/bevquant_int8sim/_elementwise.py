"""Functions of single integers: ReLU and its like with a change of scale, any other by a table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor

from bevquant_int8sim._quantize import quantize
from bevquant_int8sim._rounding import check_rounding, round_float
from bevquant_int8sim._scales import check_integer_tensor, integer_range, single_scale


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
