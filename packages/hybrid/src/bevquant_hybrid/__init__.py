"""CPU/BPU partition and quantization, under horizon_plugin_pytorch's documented names."""

from __future__ import annotations

from bevquant_hybrid import (
    dtype,
    functional,
    mapper,
    march,
    nn,
    qat_mode,
    qtensor,
    quantization,
    utils,
)
from bevquant_hybrid.march import March, get_march, set_march

__all__ = [
    "March",
    "__version__",
    "dtype",
    "functional",
    "get_march",
    "mapper",
    "march",
    "nn",
    "qat_mode",
    "qtensor",
    "quantization",
    "set_march",
    "utils",
]

__version__ = "0.1.0"
