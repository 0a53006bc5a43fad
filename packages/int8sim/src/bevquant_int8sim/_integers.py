"""Ranges of signed integers, and the tensor types that hold them."""

from __future__ import annotations

from typing import Any

import torch

_HOLDING = {8: torch.int8, 16: torch.int16, 32: torch.int32}


def integer_range(bits: int, narrow_range: bool = False, what: str = "bits") -> tuple[int, int]:
    """Smallest and largest signed integer of `bits` bits; `narrow_range` leaves out the smallest.

    Raises:
        ValueError: `bits` is no integer within 2…32; `what` is what the message calls it.
    """
    if not isinstance(bits, int) or not 2 <= bits <= 32:
        raise ValueError(
            f"{what}={bits}: expected an integer from 2 to 32 (8, 16 and 32 are what chips compute "
            "in)"
        )
    top = 2 ** (bits - 1) - 1
    return (-top if narrow_range else -top - 1), top


def holding_dtype(bits: int) -> torch.dtype:
    """The smallest of int8, int16 and int32 that holds `bits` bits."""
    return next(dtype for width, dtype in _HOLDING.items() if bits <= width)


def check_integer_tensor(
    name: str, what: str, value: Any, allowed: tuple[torch.dtype, ...]
) -> torch.Tensor:
    """Return `value` as a tensor of one of the integer types `allowed`.

    Raises:
        TypeError: It is no tensor, or of another type; `name` is the layer that the message names.
    """
    is_tensor = isinstance(value, torch.Tensor)
    if not isinstance(value, torch.Tensor) or value.dtype not in allowed:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        came = str(value.dtype).removeprefix("torch.") if is_tensor else type(value).__name__
        remedy = ""
        if is_tensor and value.is_floating_point():
            remedy = "; quantize() makes integers of float values"
        raise TypeError(f"{name}: {what} must be a tensor of {kinds}, got {came}{remedy}")
    return value
