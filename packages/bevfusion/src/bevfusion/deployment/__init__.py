"""The detector as files for engines: the part in each file, and all files in sequence.

CUDA-BEVFusion binds one set of files, Autoware's node another, a BPU takes a third. This package
defines the cuts, inputs and outputs. `export_files` writes a set with `bevquant_export` and
compares each file, and all files in sequence, with the model.
"""

from bevfusion.deployment._autoware import AUTOWARE_BOXES, autoware_files
from bevfusion.deployment._bpu import (
    beside_bpu_layers,
    bpu_pieces,
    compose_plan,
    stage_shapes,
    unit_inputs,
)
from bevfusion.deployment._check import Figures, beside_layers, join_figures
from bevfusion.deployment._export import SetExport, export_files, export_pieces, export_whole
from bevfusion.deployment._files import (
    HEAD,
    LIDAR,
    POOLED,
    FilePart,
    HeldPart,
    ReadPart,
    bpu_files,
    centerpoint_files,
    files_of,
    nvidia_files,
)
from bevfusion.deployment._pieces import Piece, Written, nvidia_pieces, outputs_of, write_piece
from bevfusion.deployment._result import (
    ExportedFile,
    ExportedSet,
    FileLayer,
    FilePort,
    SetStage,
    export_text,
    file_box_table,
    file_layer_table,
    file_size,
    file_stage_table,
    set_verdict,
)
from bevfusion.deployment._split import (
    UNIT_PREFIXES,
    SplitComparison,
    SplitModel,
    SplitStage,
    boundary_table,
    bpu_units,
    cpu_weights,
    evaluate_split,
    split_stage_table,
    split_weights,
    unit_weights,
)
from bevfusion.deployment._walk import STAGE_ENDS, Execute, between, file_boxes, walk, watching

__all__ = [
    "AUTOWARE_BOXES",
    "HEAD",
    "LIDAR",
    "POOLED",
    "STAGE_ENDS",
    "UNIT_PREFIXES",
    "Execute",
    "ExportedFile",
    "ExportedSet",
    "Figures",
    "FileLayer",
    "FilePart",
    "FilePort",
    "HeldPart",
    "Piece",
    "ReadPart",
    "SetExport",
    "SetStage",
    "SplitComparison",
    "SplitModel",
    "SplitStage",
    "Written",
    "autoware_files",
    "beside_bpu_layers",
    "beside_layers",
    "between",
    "boundary_table",
    "bpu_files",
    "bpu_pieces",
    "bpu_units",
    "centerpoint_files",
    "compose_plan",
    "cpu_weights",
    "evaluate_split",
    "export_files",
    "export_pieces",
    "export_text",
    "export_whole",
    "file_box_table",
    "file_boxes",
    "file_layer_table",
    "file_size",
    "file_stage_table",
    "files_of",
    "join_figures",
    "nvidia_files",
    "nvidia_pieces",
    "outputs_of",
    "set_verdict",
    "split_stage_table",
    "split_weights",
    "stage_shapes",
    "unit_inputs",
    "unit_weights",
    "walk",
    "watching",
    "write_piece",
]

judge_split = evaluate_split  # its former name
