"""The tracer's decorator under its documented path, and what traced models call as one node."""

from __future__ import annotations

from bevquant_hybrid._fx._tracer import called_path, is_leaf, scope_of
from bevquant_hybrid._leaf import LEAF_MARK, wrap

__all__ = ["LEAF_MARK", "called_path", "is_leaf", "scope_of", "wrap"]
