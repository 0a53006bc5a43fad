"""What a model costs on BPU and CPU, layer by layer: a roofline estimate from public figures."""

from ._cpu import estimate_cpu_layers
from ._estimate import LayerEstimate, estimate_layers, estimate_performance
from ._figures import ChipFigures, Figure, load_chip_figures
from ._operations import count_operations
from ._render import render_layers
from ._traffic import Traffic, count_traffic

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
    "render_layers",
]
