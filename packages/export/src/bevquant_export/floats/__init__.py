"""Float modules as ONNX files, through torch's exporter, held against torch before they appear."""

from __future__ import annotations

from bevquant_export.floats._compare import FloatDifference, FloatFile, compare_float_onnx
from bevquant_export.floats._export import export_float_onnx

__all__ = ["FloatDifference", "FloatFile", "compare_float_onnx", "export_float_onnx"]
