"""Quantization loss of each layer as a bar chart, and plans by time and score."""

from __future__ import annotations

from bevfusion.quantization import (
    front_picture,
    front_table,
    sensitivity_headline,
    sensitivity_plan,
    sensitivity_table,
)
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
        "front": front_table(outcome).on_page() if outcome.front else None,
        "picture": front_picture(outcome),
    }
    return Section("sensitivity", "Sensitivity", data)
