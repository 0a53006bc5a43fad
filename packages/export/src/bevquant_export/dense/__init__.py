"""Dense models as QDQ files: written for TensorRT, onnxruntime or hb_mapper."""

from __future__ import annotations

from bevquant_export.dense._export import export_qdq_onnx
from bevquant_export.dense._written import QdqFile

__all__ = ["QdqFile", "export_qdq_onnx"]
