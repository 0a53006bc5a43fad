"""Quantization loss of each layer as a bar chart, and the plan."""

from __future__ import annotations

from bevfusion.quantization import sensitivity_headline, sensitivity_plan, sensitivity_table
from bevfusion_quant.pages._content import ReportContent
from bevfusion_quant.pages._page import Section

ORDER = 60


def section(content: ReportContent) -> Section | None:
    """Headline, bars, the plan."""
    outcome = content.sensitivity
    if outcome is None:
        return None
    data = {
        "headline": sensitivity_headline(outcome),
        "plan": sensitivity_plan(outcome),
        "refusal": outcome.refusal,
        "precisions": outcome.precisions,
        "table": sensitivity_table(outcome).on_page(),
    }
    return Section("sensitivity", "Sensitivity", data)
