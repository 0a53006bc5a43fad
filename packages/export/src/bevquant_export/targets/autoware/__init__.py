"""Autoware's TensorRT plugin for sparse convolutions: files, their contract, and a run without."""

from __future__ import annotations

from bevquant_export.targets.autoware._emit import AutowareFile, export_autoware_onnx
from bevquant_export.targets.autoware._reference import (
    PLUGIN_OPERATORS,
    compare_autoware_onnx,
    run_autoware_onnx,
)

__all__ = [
    "PLUGIN_OPERATORS",
    "AutowareFile",
    "compare_autoware_onnx",
    "export_autoware_onnx",
    "run_autoware_onnx",
]
