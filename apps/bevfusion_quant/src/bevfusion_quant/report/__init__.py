"""One self-contained page on which a reviewer judges a quantized model."""

from bevfusion_quant.report._content import (
    ReportBoxes,
    ReportContent,
    ReportFigure,
    ReportScene,
    ReportStage,
)
from bevfusion_quant.report._run_page import write_pictures, write_run_page
from bevfusion_quant.report._section import PAGE_DATA, Section, read_page_data, read_sections
from bevfusion_quant.report._write import write_page, write_report

__all__ = [
    "PAGE_DATA",
    "ReportBoxes",
    "ReportContent",
    "ReportFigure",
    "ReportScene",
    "ReportStage",
    "Section",
    "read_page_data",
    "read_sections",
    "write_page",
    "write_pictures",
    "write_report",
    "write_run_page",
]
