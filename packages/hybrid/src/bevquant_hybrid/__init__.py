"""CPU/BPU partition and quantization, under horizon_plugin_pytorch's documented names."""

from __future__ import annotations

from bevquant_hybrid import (
    dtype,
    functional,
    jit,
    mapper,
    march,
    nn,
    qat_mode,
    qtensor,
    quantization,
    runtime,
    utils,
)
from bevquant_hybrid.march import March, get_march, set_march

__all__ = [
    "March",
    "__version__",
    "dtype",
    "functional",
    "get_march",
    "jit",
    "mapper",
    "march",
    "nn",
    "qat_mode",
    "qtensor",
    "quantization",
    "runtime",
    "set_march",
    "utils",
]

__version__ = "0.1.0"
