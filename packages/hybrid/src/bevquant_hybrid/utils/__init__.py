"""Tools around quantization, at their documented paths."""

from __future__ import annotations

from bevquant_hybrid.utils import fx_helper, onnx_helper

__all__ = ["fx_helper", "onnx_helper"]
