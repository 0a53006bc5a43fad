"""What each layer's rounding costs, as a chart of bars, and the plan made from it."""

from __future__ import annotations

from bevfusion_quant.report._content import ReportContent
from bevfusion_quant.report._page import Section
from bevfusion_quant.results import headline, plan_line, sensitivity_table

ORDER = 60


def section(content: ReportContent) -> Section | None:
    """Headline, bars, the plan."""
    outcome = content.sensitivity
    if outcome is None:
        return None
    data = {
        "headline": headline(outcome),
        "plan": plan_line(outcome),
        "refusal": outcome.refusal,
        "precisions": outcome.precisions,
        "table": sensitivity_table(outcome).on_page(),
    }
    return Section("sensitivity", "Sensitivity", data)
