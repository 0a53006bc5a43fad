"""Roofline estimates of layers on BPU and CPU from public figures."""

from ._estimate import (
    ChipFigures,
    Figure,
    LayerEstimate,
    Traffic,
    count_operations,
    count_traffic,
    estimate_cpu_layers,
    estimate_layers,
    estimate_performance,
    load_chip_figures,
)
from ._perf_model import perf_model, render_layers

__all__ = [
    "ChipFigures",
    "Figure",
    "LayerEstimate",
    "Traffic",
    "count_operations",
    "count_traffic",
    "estimate_cpu_layers",
    "estimate_layers",
    "estimate_performance",
    "load_chip_figures",
    "perf_model",
    "render_layers",
]
