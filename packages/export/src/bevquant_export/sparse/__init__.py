"""Sparse encoders as ONNX files for NVIDIA's libspconv or for onnxruntime: write and read."""

from __future__ import annotations

from bevquant_export._differences import LayerDifference
from bevquant_export.sparse._compare import compare_sparse_onnx
from bevquant_export.sparse._export import export_sparse_onnx
from bevquant_export.sparse._half_precision import with_half_constants
from bevquant_export.sparse._load import SparseOnnxModel, load_sparse_onnx
from bevquant_export.sparse._verify import SparseExport, SparseLayer, lower_to_portable

__all__ = [
    "LayerDifference",
    "SparseExport",
    "SparseLayer",
    "SparseOnnxModel",
    "compare_sparse_onnx",
    "export_sparse_onnx",
    "load_sparse_onnx",
    "lower_to_portable",
    "with_half_constants",
]
