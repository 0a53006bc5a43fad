"""One self-contained page on which a reviewer judges a quantized model."""

from bevfusion_quant.report._content import (
    ReportBoxes,
    ReportContent,
    ReportFigure,
    ReportScene,
    ReportStage,
)
from bevfusion_quant.report._write import write_report

__all__ = [
    "ReportBoxes",
    "ReportContent",
    "ReportFigure",
    "ReportScene",
    "ReportStage",
    "write_report",
]
