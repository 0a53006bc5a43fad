"""`wrap` under its documented path: traced models call the decorated object as one node."""

from __future__ import annotations

from bevquant_hybrid._fx._tracer import called_path, is_leaf, scope_of
from bevquant_hybrid._leaf import LEAF_MARK, wrap

__all__ = ["LEAF_MARK", "called_path", "is_leaf", "scope_of", "wrap"]
