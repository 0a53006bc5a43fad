"""One page to sign: a run, what was measured of it, what is missing, where each figure is from."""

from bevfusion_quant.review._checks import Check
from bevfusion_quant.review._gather import Evidence, Gathered, Measured, gather, read_evidence
from bevfusion_quant.review._headline import HeadlineGroup, HeadlineRow
from bevfusion_quant.review._run import (
    ReviewResult,
    find_browser,
    print_pdf,
    review_text,
    run_review,
)

__all__ = [
    "Check",
    "Evidence",
    "Gathered",
    "HeadlineGroup",
    "HeadlineRow",
    "Measured",
    "ReviewResult",
    "find_browser",
    "gather",
    "print_pdf",
    "read_evidence",
    "review_text",
    "run_review",
]
