"""Any elementwise function of an int8 tensor: a table of its 256 results."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bevquant_int8sim._integers import check_integer_tensor
from bevquant_int8sim._quantize import quantize
from bevquant_int8sim._rounding import check_rounding
from bevquant_int8sim._scales import single_scale


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
