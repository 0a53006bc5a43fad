"""Suggestion of CPU layers for a hybrid model, from the accuracy cost of each layer."""

from __future__ import annotations

from bevquant_hybrid_tools.suggestion._suggestion import output_sqnr

from ._suggest_cpu import suggest_cpu
from ._suggestion import CpuMove, CpuSuggestion

__all__ = ["CpuMove", "CpuSuggestion", "output_sqnr", "suggest_cpu"]
