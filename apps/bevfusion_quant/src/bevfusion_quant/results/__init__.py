"""What commands found, as plain rows and as text: pages and summaries are made of it."""

from bevfusion_quant.results._bpu import BpuComparison, BpuEstimate, BpuLayer, BpuOutcome, BpuStage
from bevfusion_quant.results._export import (
    ExportedFile,
    ExportedSet,
    FileLayer,
    FilePort,
    SetStage,
    export_text,
    file_size,
    set_verdict,
)
from bevfusion_quant.results._sensitivity import (
    SensitivityOutcome,
    headline,
    plan_line,
    sensitivity_text,
)

__all__ = [
    "BpuComparison",
    "BpuEstimate",
    "BpuLayer",
    "BpuOutcome",
    "BpuStage",
    "ExportedFile",
    "ExportedSet",
    "FileLayer",
    "FilePort",
    "SensitivityOutcome",
    "SetStage",
    "export_text",
    "file_size",
    "headline",
    "plan_line",
    "sensitivity_text",
    "set_verdict",
]
