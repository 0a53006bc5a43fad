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
from bevfusion_quant.results._table import (
    Cell,
    CellParts,
    Column,
    Row,
    Table,
    mean_ap_apart,
    plain_table,
    setting_text,
    with_interval,
)

__all__ = [
    "BpuComparison",
    "BpuEstimate",
    "BpuLayer",
    "BpuOutcome",
    "BpuStage",
    "Cell",
    "CellParts",
    "Column",
    "ExportedFile",
    "ExportedSet",
    "FileLayer",
    "FilePort",
    "Row",
    "SensitivityOutcome",
    "SetStage",
    "Table",
    "export_text",
    "file_size",
    "headline",
    "mean_ap_apart",
    "plain_table",
    "plan_line",
    "sensitivity_text",
    "set_verdict",
    "setting_text",
    "with_interval",
]
