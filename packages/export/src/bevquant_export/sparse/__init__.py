"""Sparse encoders as ONNX files of NVIDIA's libspconv, written and read back."""

from __future__ import annotations

from bevquant_export.sparse._compare import LayerDifference, compare_sparse_onnx
from bevquant_export.sparse._export import SparseExport, SparseLayer, export_sparse_onnx
from bevquant_export.sparse._half_precision import with_half_constants
from bevquant_export.sparse._load import SparseOnnxModel, load_sparse_onnx

__all__ = [
    "LayerDifference",
    "SparseExport",
    "SparseLayer",
    "SparseOnnxModel",
    "compare_sparse_onnx",
    "export_sparse_onnx",
    "load_sparse_onnx",
    "with_half_constants",
]
