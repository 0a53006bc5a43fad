"""Ranges of signed integers, and the tensor types that hold them."""

from __future__ import annotations

import torch

__all__ = ["check_integer_tensor", "holding_dtype", "integer_range"]

_HOLDING = {8: torch.int8, 16: torch.int16, 32: torch.int32}


def integer_range(bits: int, narrow_range: bool = False) -> tuple[int, int]:
    """Smallest and largest signed integer of `bits` bits; `narrow_range` leaves out the smallest.

    Raises:
        ValueError: `bits` lies outside 2…32.
    """
    if not 2 <= bits <= 32:
        raise ValueError(f"bits={bits}: expected 2 to 32 (8, 16 and 32 are what chips compute in)")
    top = 2 ** (bits - 1) - 1
    return (-top if narrow_range else -top - 1), top


def holding_dtype(bits: int) -> torch.dtype:
    """The smallest of int8, int16 and int32 that holds `bits` bits."""
    return next(dtype for width, dtype in _HOLDING.items() if bits <= width)


def check_integer_tensor(
    name: str, what: str, value: object, allowed: tuple[torch.dtype, ...]
) -> torch.Tensor:
    """Return `value` as a tensor of one of the integer types `allowed`.

    Raises:
        TypeError: It is no tensor, or of another type; `name` is the layer that the message names.
    """
    if not isinstance(value, torch.Tensor) or value.dtype not in allowed:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        came = str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(
            f"{name}: {what} must be a tensor of {kinds}, got {came.removeprefix('torch.')}; "
            "quantize() makes integers of float values"
        )
    return value
