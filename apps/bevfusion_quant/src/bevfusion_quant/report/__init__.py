"""One page to sign: a run, its measurements, missing ones, and the source of each figure."""

from bevfusion_quant.report._checks import Check
from bevfusion_quant.report._gather import Evidence, Gathered, Measured, gather, read_evidence
from bevfusion_quant.report._headline import HeadlineGroup, HeadlineRow
from bevfusion_quant.report._run import (
    ReportResult,
    find_browser,
    print_pdf,
    report_text,
    run_report,
)

__all__ = [
    "Check",
    "Evidence",
    "Gathered",
    "HeadlineGroup",
    "HeadlineRow",
    "Measured",
    "ReportResult",
    "find_browser",
    "gather",
    "print_pdf",
    "read_evidence",
    "report_text",
    "run_report",
]
