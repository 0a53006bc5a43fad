"""Rounding to integers, of float64 values and of integers divided by a power of two."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Rounding = Literal["half_even", "half_up", "half_away"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)


def check_rounding(rounding: str, what: str = "rounding") -> str:
    """Return `rounding`, or refuse values outside `ROUNDINGS`."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"{what}={rounding!r}: expected one of {', '.join(map(repr, ROUNDINGS))}")
    return rounding


def round_float(values: Tensor, rounding: str) -> Tensor:
    """Round float64 values to integers, still as float64.

    ``half_even``: 0.5 → 0, 1.5 → 2, −2.5 → −2. ``half_up``: ⌊v + ½⌋ of the exact sum, 0.5 → 1,
    −0.5 → 0, −2.5 → −2. ``half_away``: away from zero, as C's ``round``, −2.5 → −3. A float64
    ``v + 0.5`` would itself be rounded, up to 1 for the largest float below one half; so the
    fraction is compared instead.
    """
    if check_rounding(rounding) == "half_even":
        return torch.round(values)
    if rounding == "half_away":
        whole = torch.trunc(values)
        return whole + ((values - whole).abs() >= 0.5) * values.sign()
    floor = torch.floor(values)
    return floor + (values - floor >= 0.5).to(values.dtype)


def shift_right(values: Tensor, shift: Tensor, rounding: str) -> Tensor:
    """``round(values / 2**shift)`` in int64, exact for values within ±2⁶² and shift 0 to 62."""
    floor = values >> shift
    rest = values - (floor << shift)
    half = torch.where(shift > 0, torch.ones_like(shift) << (shift - 1).clamp(min=0), 0)
    above = (rest > half) & (shift > 0)
    tie = (rest == half) & (shift > 0)
    upward = {
        "half_even": floor % 2 == 1,
        "half_up": torch.ones_like(tie),
        "half_away": values >= 0,
    }[check_rounding(rounding)]
    return floor + (above | (tie & upward)).to(torch.int64)
