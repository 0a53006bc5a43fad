"""The tracer's decorator under its documented path, and what traced models call as one node."""

from __future__ import annotations

from bevquant_hybrid._fx._tracer import is_leaf
from bevquant_hybrid._leaf import LEAF_MARK, wrap

__all__ = ["LEAF_MARK", "is_leaf", "wrap"]
