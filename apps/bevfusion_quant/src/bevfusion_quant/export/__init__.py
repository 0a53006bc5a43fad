"""A run's model as ONNX files: written, linted, run and held against the integer model."""

from bevfusion.deployment import (
    ExportedFile,
    ExportedSet,
    FileLayer,
    FilePart,
    FilePort,
    SetStage,
    bpu_files,
    export_text,
    file_size,
    nvidia_files,
    outputs_of,
    set_verdict,
    walk,
    watching,
    write_piece,
)
from bevfusion_quant.export._export import (
    ONNX_FOLDER,
    export_model,
    missing_libraries,
    nvidia_pieces,
    refuse_wrong_files,
)
from bevfusion_quant.export._run import ExportResult, export_run
from bevfusion_quant.options import ExportTarget

__all__ = [
    "ONNX_FOLDER",
    "ExportResult",
    "ExportTarget",
    "ExportedFile",
    "ExportedSet",
    "FileLayer",
    "FilePart",
    "FilePort",
    "SetStage",
    "bpu_files",
    "export_model",
    "export_run",
    "export_text",
    "file_size",
    "missing_libraries",
    "nvidia_files",
    "nvidia_pieces",
    "outputs_of",
    "refuse_wrong_files",
    "set_verdict",
    "walk",
    "watching",
    "write_piece",
]
