"""Numbers as a reader wants them."""

from __future__ import annotations

import math

__all__ = [
    "count",
    "decibels",
    "finite",
    "fixed",
    "memory",
    "number",
    "part_of",
    "percent",
    "seconds",
]

DASH = "–"


def finite(value: float | None) -> float | None:
    """The number, or None for NaN and infinity too."""
    return value if value is not None and math.isfinite(value) else None


def fixed(value: float | None, digits: int) -> str:
    """A number with that many decimals; a dash where there is none."""
    return DASH if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def number(value: float | None, digits: int = 4) -> str:
    """A number to that many significant digits."""
    return DASH if value is None or not math.isfinite(value) else f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """A count with its thousands apart.

    Examples:
        >>> count(26404.4)
        '26,404'
    """
    return DASH if value is None or not math.isfinite(value) else f"{value:,.0f}"


def decibels(value: float | None) -> str:
    """An SQNR."""
    return DASH if finite(value) is None else f"{value:.1f} dB"


def percent(share: float | None) -> str:
    """A share as per cent, small ones not rounded away.

    Examples:
        >>> percent(0.0), percent(0.1234), percent(1e-7)
        ('0 %', '12.3 %', '< 0.001 %')
    """
    if share is None or not math.isfinite(share):
        return DASH
    if share == 0:
        return "0 %"
    if share < 1e-5:
        return "< 0.001 %"
    if share >= 0.01:
        return f"{share * 100:.1f} %"
    return f"{float(f'{share * 100:.2g}')!r} %"


def seconds(value: float) -> str:
    """A duration."""
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def memory(mib: float) -> str:
    """An amount of memory given in MiB."""
    return f"{mib:,.0f} MiB" if mib < 10_000 else f"{mib / 1024:.1f} GiB"


def part_of(path: str) -> str:
    """The part of the model that a path lies in.

    Examples:
        >>> part_of("encoders.camera.neck.0"), part_of("fuser.0"), part_of("heads.object.x")
        ('camera', 'fuser', 'head')
    """
    first, *rest = path.split(".")
    if first == "encoders" and rest:
        return rest[0]
    return "head" if first == "heads" else first
