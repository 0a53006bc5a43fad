"""Dense models as QDQ files for TensorRT, onnxruntime or hb_mapper: write and compare.

`_read_model` lowers a model and runs it; the result is a `_source.Source`. `_emit` writes its steps
one by one into a `_graph.Graph`: integer layers by `_weighted`, layout operators by `_layout_ops`,
pooling by `_grid`, float operations by `_floats` and `_aten` or else `_torch_form`, voxels by
`_voxels`. `_export` makes the ONNX model. A target's finishing steps (`Profile.passes`) and the
types of half precision (`_half_trial`) are passes over an onnx-ir model. `_compare` compares the
file with the program, cut (`_cut`) at every quantized tensor.
"""

from __future__ import annotations

from bevquant_export._differences import TensorDifference
from bevquant_export.dense._export import export_qdq_onnx
from bevquant_export.dense._source import QdqProgram
from bevquant_export.dense._written import QdqFile
from bevquant_export.dense.verify._compare import compare_qdq_onnx

__all__ = [
    "QdqFile",
    "QdqProgram",
    "TensorDifference",
    "compare_qdq_onnx",
    "export_qdq_onnx",
]
