"""Files run on the CPU at hand, by onnxruntime, OpenVINO or ONNX's reference."""

from __future__ import annotations

from bevquant_export.runtime._open import lift_horizon_onnx, open_onnx

__all__ = ["lift_horizon_onnx", "open_onnx"]
