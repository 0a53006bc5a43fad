"""Dense models as QDQ files: written for TensorRT, onnxruntime or hb_mapper, and compared.

`_read_model` lowers a model and runs it, which gives a `_source.Source`. `_emit` writes its steps
one by one into a `_graph.Graph`: layers of integers by `_weighted`, what moves values by
`_layout_ops`, pooling by `_grid`, floats by `_floats` and `_aten` or else `_torch_form`, voxels by
`_voxels`. `_export` makes the model of that. `_compare` holds it against the program, cut (`_cut`)
at every quantized tensor.
"""

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
