"""Tools around quantization, at their documented paths."""

from __future__ import annotations

import importlib
from types import ModuleType

from bevquant_hybrid.utils import fx_helper, onnx_helper

__all__ = ["fx_helper", "onnx_helper", "quant_profiler"]


def __getattr__(name: str) -> ModuleType:
    """Import the profiler on first use, since it imports this package."""
    if name == "quant_profiler":
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
