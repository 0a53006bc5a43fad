"""Tools beside models for Horizon BPUs: profiler, estimates of time, suggestions, pictures."""

from __future__ import annotations

from bevquant_hybrid_tools import by_layer, drawing, forms, performance, quant_profiler, suggestion
from bevquant_hybrid_tools._visualize import visualize_model, visualize_partition
from bevquant_hybrid_tools.performance import perf_model
from bevquant_hybrid_tools.suggestion import CpuMove, CpuSuggestion, suggest_cpu

__version__ = "0.2.0"
__all__ = [
    "CpuMove",
    "CpuSuggestion",
    "by_layer",
    "drawing",
    "forms",
    "perf_model",
    "performance",
    "quant_profiler",
    "suggest_cpu",
    "suggestion",
    "visualize_model",
    "visualize_partition",
]
