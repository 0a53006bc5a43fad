"""`wrap` under its newer documented path."""

from __future__ import annotations

from bevquant_hybrid._leaf import wrap

__all__ = ["wrap"]
