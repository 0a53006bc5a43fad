"""Rounding to integers, and multipliers as integer-only hardware holds them."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from bevquant_int8sim._scales import checked_scale

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
    −0.5 → 0, −2.5 → −2. ``half_away``: away from zero, as C's ``round``, −2.5 → −3.
    """
    if check_rounding(rounding) == "half_even":
        return torch.round(values)
    if rounding == "half_away":
        whole = torch.trunc(values)
        return whole + ((values - whole).abs() >= 0.5) * values.sign()
    # A float64 v + 0.5 would itself be rounded, up to 1 for the largest float below one half.
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


# Multipliers as integer-only hardware holds them: a mantissa and a right shift.

_NOTHING_LEFT = 62  # |acc · mantissa| ≤ 2³¹·(2³¹ − 1) < 2⁶²: shifted further it rounds to 0


def fixed_point_multiplier(
    multiplier: Tensor | float, *, bits: int = 31, name: str = "fixed_point_multiplier"
) -> tuple[Tensor, Tensor]:
    r"""Split a multiplier for hardware without floating point.

    .. math:: M \approx m \cdot 2^{-shift}, \quad 2^{bits-1} \le m < 2^{bits}

    with m rounded to nearest, ties up: the normalised mantissa of Jacob et al. 2018, section 2.2,
    as TFLite's ``QuantizeMultiplier`` with 31 bits derives it.

    Args:
        multiplier: Positive, one number or one per channel, below 2³¹.
        bits: Bits of the mantissa without its sign, 7 to 31 (15 for 16-bit multipliers).
        name: The layer that a message names.

    Returns:
        Mantissa and right shift, int64, shaped as `multiplier`.

    Raises:
        ValueError: A multiplier is not positive, not finite, or too large for a right shift.

    Example:
        >>> m, shift = fixed_point_multiplier(0.3)
        >>> int(m), int(shift), int(m) / 2 ** int(shift)
        (1288490189, 32, 0.30000000004656613)
    """
    if not isinstance(bits, int) or not 7 <= bits <= 31:
        raise ValueError(f"{name}: a mantissa of {bits!r} bits: expected 7 to 31")
    values = checked_scale(multiplier, f"{name}: multiplier")
    fraction, exponent = torch.frexp(values)  # fraction in [½, 1)
    mantissa = torch.floor(fraction * 2.0**bits + 0.5).to(torch.int64)
    exponent = exponent.to(torch.int64)
    # Rounded up to 2^bits, a mantissa has one bit too many.
    carry = mantissa == 2**bits
    mantissa, exponent = torch.where(carry, mantissa >> 1, mantissa), exponent + carry
    shift = bits - exponent
    if bool((shift < 0).any()):
        raise ValueError(
            f"{name}: multiplier {float(values.max())} is too large for a mantissa of {bits} bits "
            "and a right shift; give the output a larger scale"
        )
    return mantissa, shift


def multiply_fixed_point(
    acc: Tensor, mantissa: Tensor, shift: Tensor, rounding: str = "half_even"
) -> Tensor:
    """``round(acc · mantissa / 2**shift)``, exact in int64 and rounded once.

    `acc` is within int32; `mantissa` and `shift` broadcast against it.
    """
    product = acc.to(torch.int64) * mantissa
    result = shift_right(product, shift.clamp(max=_NOTHING_LEFT), rounding)
    return torch.where(shift > _NOTHING_LEFT, 0, result)
