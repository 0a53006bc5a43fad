"""Dense models as QDQ files: written for TensorRT, onnxruntime or hb_mapper, and compared."""

from __future__ import annotations

from bevquant_export.dense._compare import compare_qdq_onnx
from bevquant_export.dense._export import export_qdq_onnx
from bevquant_export.dense._program_of import QdqProgram
from bevquant_export.dense._runnable import lift_horizon_onnx, open_onnx
from bevquant_export.dense._written import QdqFile, TensorDifference

__all__ = [
    "QdqFile",
    "QdqProgram",
    "TensorDifference",
    "compare_qdq_onnx",
    "export_qdq_onnx",
    "lift_horizon_onnx",
    "open_onnx",
]
