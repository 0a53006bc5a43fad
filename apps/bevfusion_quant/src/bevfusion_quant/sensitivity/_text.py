"""The table and the plan on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bev_data.metrics import aligned_table
from bevfusion_quant.ptq._summary import or_dash

if TYPE_CHECKING:
    from bevfusion_quant.sensitivity._outcome import SensitivityOutcome
    from bevquant_qnn import SensitivityRow

__all__ = ["group_name", "headline", "plan_line", "sensitivity_text"]

_DIGITS = {"sqnr": ".1f", "kl": ".2e", "mAP": ".2f"}
_TITLES = {"sqnr": "SQNR", "kl": "KL divergence, negative,", "mAP": "mAP"}


def sensitivity_text(outcome: SensitivityOutcome) -> tuple[str, ...]:
    """Headline, one line for each group of layers, the largest loss first; the plan in a line."""
    table, form = outcome.table, _DIGITS[outcome.table.metric]
    measured = outcome.precisions
    unit = f" {outcome.unit}"
    head = ["layers", "operations"]
    for name in measured:
        head += [f"{name} alone{unit}", "share of loss"]
    both, planned = table.quantized_score is not None, outcome.plan is not None
    head += [*["gain in float"] * both, *["plan"] * planned]
    rows = []
    for row in table.worst_first(measured[0]):
        cells = [group_name(row), f"{row.operations / max(1, outcome.operations):.1%}"]
        for name in measured:
            cells += [format(row.alone[name], form), f"{outcome.share(row, name):.1%}"]
        gains = [or_dash(outcome.gain(row), f"+{form}")] * both
        rows.append([*cells, *gains, *[outcome.chosen(row) or ""] * planned])
    return (headline(outcome), aligned_table(head, rows), *[plan_line(outcome)] * planned)


def headline(outcome: SensitivityOutcome) -> str:
    """What was scored, and the two ends of the scale."""
    table, form = outcome.table, _DIGITS[outcome.table.metric]
    frames = f"{table.batches} frame{'s' * (table.batches != 1)}"
    groups = len(table.rows)
    title = _TITLES[table.metric]
    text = f"{title} of {outcome.scored}, {frames}, {groups} group{'s' * (groups != 1)}"
    text += f" of layers: float {format(table.float_score, form)}"
    if table.quantized_score is not None:
        text += f", quantized {format(table.quantized_score, form)} {outcome.unit}"
    return text


def plan_line(outcome: SensitivityOutcome) -> str:
    """The plan in a line: what is chosen how often, estimated time and score."""
    plan = outcome.plan
    if plan is None:
        return ""
    counts: dict[str, int] = {}
    for group in plan:
        counts[group.precision] = counts.get(group.precision, 0) + 1
    chosen = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    score = or_dash(plan.score, _DIGITS[outcome.table.metric])
    how = "measured" if plan.measured else "estimated"
    text = (
        f"Plan for {outcome.budget}: {chosen}; estimated time {or_dash(plan.time, '.3g')} of "
        f"int8, {how} score {score} {outcome.unit}"
    )
    if outcome.refined is not None:
        first = or_dash(outcome.refined.start.score, _DIGITS[outcome.table.metric])
        text += f", the best of {outcome.refined.tried} measured; the first had {first}"
    return text


def group_name(row: SensitivityRow) -> str:
    """The group's first path without the stem that all share, and how many more it has."""
    more = len(row.modules) - 1
    return row.name.removeprefix("encoders.") + (f" +{more}" if more else "")
