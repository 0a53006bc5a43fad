"""ONNX files of quantized models, sparse and dense: write, lint, read and run.

The folders. Each imports only folders listed before it:

- `lint`: rules on the graphs of a file.
- `floats`: float operations in ONNX's operators.
- `voxels`: ONNX functions that find, gather and sum voxels.
- `half`: float16 or float32 for each value of a file.
- `runtime`: runs of a file on the CPU at hand.
- `qdq_reader`: QDQ files, of other tools too, as integer models.
- `dense`: QDQ files, written and compared.
- `sparse`: sparse encoders, for libspconv or in standard operators.
- `targets`: engines, one module each.
- `detector`: a whole model as files for libspconv and another engine.
"""

from __future__ import annotations

from bevquant_export._differences import TensorCheck, check_tensors
from bevquant_export._float_file import (
    FloatDifference,
    FloatFile,
    compare_float_onnx,
    export_float_onnx,
)
from bevquant_export._version import __version__ as __version__
from bevquant_export.dense import (
    QdqFile,
    QdqProgram,
    TensorDifference,
    compare_qdq_onnx,
    export_qdq_onnx,
)
from bevquant_export.detector import (
    DetectorExport,
    DetectorMap,
    FrameCheck,
    MapCheck,
    OutputCheck,
    export_detector,
)
from bevquant_export.lint import Finding, lint_onnx, note_calibration
from bevquant_export.qdq_reader import float_qdq_model, load_qdq_onnx
from bevquant_export.runtime import lift_horizon_onnx, open_onnx
from bevquant_export.sparse import (
    LayerDifference,
    SparseExport,
    SparseLayer,
    SparseOnnxModel,
    compare_sparse_onnx,
    export_sparse_onnx,
    load_sparse_onnx,
    lower_to_portable,
    with_half_constants,
)
from bevquant_export.targets import Target, cpu_at_hand, find_target, register_target, target_names

__all__ = [
    "DetectorExport",
    "DetectorMap",
    "Finding",
    "FloatDifference",
    "FloatFile",
    "FrameCheck",
    "LayerDifference",
    "MapCheck",
    "OutputCheck",
    "QdqFile",
    "QdqProgram",
    "SparseExport",
    "SparseLayer",
    "SparseOnnxModel",
    "Target",
    "TensorCheck",
    "TensorDifference",
    "check_tensors",
    "compare_float_onnx",
    "compare_qdq_onnx",
    "compare_sparse_onnx",
    "cpu_at_hand",
    "export_detector",
    "export_float_onnx",
    "export_qdq_onnx",
    "export_sparse_onnx",
    "find_target",
    "float_qdq_model",
    "lift_horizon_onnx",
    "lint_onnx",
    "load_qdq_onnx",
    "load_sparse_onnx",
    "lower_to_portable",
    "note_calibration",
    "open_onnx",
    "register_target",
    "target_names",
    "with_half_constants",
]
