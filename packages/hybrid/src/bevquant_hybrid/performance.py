"""Estimates of time, from `bevquant_hybrid_tools`, under their documented path."""

from __future__ import annotations

from bevquant_hybrid._documented import names_from

_NAMES = (
    "ChipFigures Figure LayerEstimate Traffic count_operations count_traffic estimate_cpu_layers "
    "estimate_layers estimate_performance load_chip_figures perf_model render_layers"
).split()
__all__ = [*_NAMES]

__getattr__ = names_from("performance", *_NAMES)
