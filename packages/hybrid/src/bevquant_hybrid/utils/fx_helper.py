"""The tracer's decorator under its documented path."""

from __future__ import annotations

from bevquant_hybrid._leaf import LEAF_MARK, wrap

__all__ = ["LEAF_MARK", "wrap"]
