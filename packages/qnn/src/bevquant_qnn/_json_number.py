"""Numbers out of a JSON document of unknown hands."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["number", "optional_number"]


def number(value: Any) -> float:
    """A finite number.

    Raises:
        ValueError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def optional_number(value: Any) -> float | None:
    """A finite number, or ``None`` for null."""
    return None if value is None else number(value)
