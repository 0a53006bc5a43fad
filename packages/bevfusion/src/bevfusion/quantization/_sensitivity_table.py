"""Result of measuring the sensitivity as text, table and record."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from bev_data.metrics import or_dash
from bev_data.tables import Cell, CellParts, Column, Row, Table
from bevquant_qnn import PrecisionPlan, RefinedPlan, SensitivityRow, SensitivityTable

_WIDE, _HIGH, _GAP = 100.0, 7.0, 2.0  # of a bar, in its own units
_DIGITS = {"sqnr": ".1f", "kl": ".2e", "mAP": ".2f"}
_TITLES = {"sqnr": "SQNR", "kl": "KL divergence, negative,", "mAP": "mAP"}
_UNITS = {"sqnr": "dB", "kl": "nats", "mAP": "points"}
_SCORED = {
    "": "the model's own output",
    "decoder.neck": "the decoder's map",
    "pts_neck": "the decoder's map",
    "heads.object.heatmap_head": "the head's heat map",
}


@dataclass(frozen=True, eq=False)
class SensitivityOutcome:
    """The table, the scored output, and the plan if a budget was given.

    Attributes:
        table: Quantization loss of every group of layers.
        output: Path of the module whose output was scored; "" for the model's own.
        precisions: Precisions at which groups were measured alone, in that order.
        plan: Plan within the budget; None without one.
        budget: The budget as given, such as "time=1.2"; "" without one.
        refusal: Reason why there is no plan although a budget was given; else "".
        estimated: The plan from added losses, with which the measurement started.
        refined: The measured plan, the measured first plan, and the number of measured plans.
    """

    table: SensitivityTable
    output: str
    precisions: tuple[str, ...]
    plan: PrecisionPlan | None = None
    budget: str = ""
    refusal: str = ""
    estimated: PrecisionPlan | None = None
    refined: RefinedPlan | None = None

    @property
    def unit(self) -> str:
        """The unit of scores."""
        return _UNITS[self.table.metric]

    @property
    def scored(self) -> str:
        """The scored output, as text."""
        return "the boxes" if self.table.metric == "mAP" else _SCORED[self.output]

    @property
    def operations(self) -> int:
        """Operations of all groups on the first frame."""
        return sum(row.operations for row in self.table)

    def share(self, row: SensitivityRow, precision: str) -> float:
        """A group's share of the loss of all groups at that precision; 0 without loss."""
        whole = sum(self.table.loss(other, precision) for other in self.table)
        return self.table.loss(row, precision) / whole if whole else 0.0

    def gain(self, row: SensitivityRow) -> float | None:
        """Gain of the score if this group alone is left in float."""
        if row.without is None or self.table.quantized_score is None:
            return None
        return row.without - self.table.quantized_score

    def chosen(self, row: SensitivityRow) -> str | None:
        """The plan's precision for a group."""
        return None if self.plan is None else self.plan[row.name]

    def summary(self) -> dict[str, Any]:
        """All results, as JSON."""
        return {
            "scored": self.scored,
            "output": self.output,
            "unit": self.unit,
            "precisions": self.precisions,
            "budget": self.budget or None,
            "refusal": self.refusal or None,
            "table": json.loads(self.table.to_json()),
            "plan": None if self.plan is None else json.loads(self.plan.to_json()),
            "plan_from": self._plan_from(),
        }

    def _plan_from(self) -> dict[str, Any] | None:
        """How the measured plan was found."""
        if self.refined is None or self.estimated is None:
            return None
        start = self.refined.start
        return {
            "plans_measured": self.refined.tried,
            "first": {
                "time": start.time,
                "estimated_score": self.estimated.score,
                "measured_score": start.score,
            },
        }


class _Row(msgspec.Struct):
    modules: list[str]
    alone: dict[str, float]


class _Table(msgspec.Struct):
    rows: list[_Row]


class SensitivitySummary(msgspec.Struct):
    """Fields of `SensitivityOutcome.summary` about the layers, read from JSON."""

    precisions: list[str]
    unit: str
    scored: str
    table: _Table


def sensitivity_text(outcome: SensitivityOutcome) -> tuple[str, ...]:
    """Headline, one line for each group of layers, the largest loss first; the plan in a line."""
    plan = [sensitivity_plan(outcome)] if outcome.plan is not None else []
    return (
        sensitivity_headline(outcome),
        sensitivity_table(outcome).text(without="encoders."),
        *plan,
    )


def sensitivity_table(outcome: SensitivityOutcome) -> Table:
    """One line for each group of layers, the largest loss first."""
    columns = [Column("Layers"), Column("Loss", "bars", only="page"), Column("Operations", "minor")]
    for name in outcome.precisions:
        share = Column("share of loss", only="terminal")
        columns += [Column(f"{name} alone {outcome.unit}"), share]
    if outcome.table.quantized_score is not None:
        columns.append(Column("Gain in float", "minor"))
    if outcome.plan is not None:
        columns.append(Column("Plan"))
    worst = outcome.table.worst_first(outcome.precisions[0])
    rows = [Row(_cells(outcome, row)) for row in worst]
    title = "Loss of each group of layers"
    return Table(title, columns, rows, "long", "sensitivity-bars", "dense")


def _cells(outcome: SensitivityOutcome, row: SensitivityRow) -> list[Cell]:
    form = _DIGITS[outcome.table.metric]
    cells: list[Cell] = [
        CellParts(path=row.name, more=row.modules[1:]),
        CellParts(bars=_bars(outcome, row)),
        f"{row.operations / max(1, outcome.operations):.1%}",
    ]
    for name in outcome.precisions:
        cells += [format(row.alone[name], form), f"{outcome.share(row, name):.1%}"]
    if outcome.table.quantized_score is not None:
        cells.append(or_dash(outcome.gain(row), f"+z{form}"))
    chosen = outcome.chosen(row)
    if chosen is not None:
        cells.append(CellParts(text=chosen, badge=f"precision {chosen}"))
    return cells


def _bars(outcome: SensitivityOutcome, row: SensitivityRow) -> dict[str, object]:
    """One bar for each precision, as long as its loss beside the largest of all."""
    losses = {name: outcome.table.loss(row, name) for name in outcome.precisions}
    largest = max(
        (outcome.table.loss(other, name) for other in outcome.table for name in losses), default=0.0
    )
    share_text = ", ".join(f"{name} {outcome.share(row, name):.1%}" for name in losses)
    blocks = [
        {
            "kind": name,
            "left": 0.0,
            "top": index * (_HIGH + _GAP),
            "width": _WIDE * loss / largest if largest else 0.0,
            "height": _HIGH,
        }
        for index, (name, loss) in enumerate(losses.items())
    ]
    high = len(losses) * (_HIGH + _GAP) - _GAP
    return {"height": high, "label": f"Share of loss: {share_text}", "blocks": blocks}


def sensitivity_headline(outcome: SensitivityOutcome) -> str:
    """The scored output, and the scores of the float and the quantized model."""
    table, form = outcome.table, _DIGITS[outcome.table.metric]
    frames = f"{table.batches} frame{'s' * (table.batches != 1)}"
    groups = len(table.rows)
    title = _TITLES[table.metric] + (" (layers estimated)" if table.estimated else "")
    text = f"{title} of {outcome.scored}, {frames}, {groups} group{'s' * (groups != 1)}"
    text += f" of layers: float {format(table.float_score, form)}"
    if table.quantized_score is not None:
        text += f", quantized {format(table.quantized_score, form)}"
    return f"{text} {outcome.unit}"


def sensitivity_plan(outcome: SensitivityOutcome) -> str:
    """The plan in a line: number of groups by precision, estimated time and score."""
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
        f"Plan for {outcome.budget}: {chosen}; estimated time {or_dash(plan.time, '.3g')} "
        f"times int8's, {how} score {score} {outcome.unit}"
    )
    if outcome.refined is not None:
        first = or_dash(outcome.refined.start.score, _DIGITS[outcome.table.metric])
        text += f", the best of {outcome.refined.tried} measured; the search began at {first}"
    return text
