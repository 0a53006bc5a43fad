"""One self-contained page on which a reviewer judges a quantized model."""

from bevfusion_quant.pages._content import (
    LOW_SQNR_DB,
    ReportBoxes,
    ReportContent,
    ReportFigure,
    ReportScene,
    ReportStage,
)
from bevfusion_quant.pages._format import by_page_scheme, partition_picture, setting_text
from bevfusion_quant.pages._page import PAGE_DATA, Section, read_sections, write_page
from bevfusion_quant.pages._run_page import (
    EvaluatedRun,
    head,
    sizes_title,
    write_found,
    write_report,
)
from bevfusion_quant.pages._sections.reproduce import section as reproduce

__all__ = [
    "LOW_SQNR_DB",
    "PAGE_DATA",
    "EvaluatedRun",
    "ReportBoxes",
    "ReportContent",
    "ReportFigure",
    "ReportScene",
    "ReportStage",
    "Section",
    "by_page_scheme",
    "head",
    "partition_picture",
    "read_sections",
    "reproduce",
    "setting_text",
    "sizes_title",
    "write_found",
    "write_page",
    "write_report",
]
