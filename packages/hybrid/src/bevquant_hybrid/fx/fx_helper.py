"""The tracer's decorator under the path that newer scripts take it from."""

from __future__ import annotations

from bevquant_hybrid._leaf import wrap

__all__ = ["wrap"]
