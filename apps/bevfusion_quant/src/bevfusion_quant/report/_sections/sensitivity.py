"""What each layer's rounding costs, as a chart of bars, and the plan made from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bevfusion_quant.report._format import fixed, number, percent
from bevfusion_quant.report._page import Section
from bevfusion_quant.results import Cell, CellParts, Column, Row, Table, headline, plan_line

if TYPE_CHECKING:
    from bevfusion_quant.report._content import ReportContent
    from bevfusion_quant.results import SensitivityOutcome
    from bevquant_qnn import SensitivityRow

__all__ = ["ORDER", "section"]

ORDER = 60
WIDE, HIGH, GAP = 100.0, 7.0, 2.0  # of a bar, in its own units


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
        "table": _table(outcome),
    }
    return Section("sensitivity", "Sensitivity", data)


def _table(outcome: SensitivityOutcome) -> Table:
    columns = [Column("Layers"), Column("Loss", "bars")]
    columns += [Column(f"{name} alone") for name in outcome.precisions]
    if outcome.table.quantized_score is not None:
        columns.append(Column("Gain in float", "minor"))
    columns.append(Column("Operations", "minor"))
    if outcome.plan is not None:
        columns.append(Column("Plan"))
    worst = outcome.table.worst_first(outcome.precisions[0])
    rows = [Row(_cells(outcome, row)) for row in worst]
    title = "Loss of each group of layers"
    return Table(title, columns, rows, "long", "sensitivity-bars", "dense")


def _cells(outcome: SensitivityOutcome, row: SensitivityRow) -> list[Cell]:
    cells: list[Cell] = [
        CellParts(path=row.name, more=row.modules[1:]),
        CellParts(bars=_bars(outcome, row)),
        *(_score(outcome, row.alone[name]) for name in outcome.precisions),
    ]
    gain, chosen = outcome.gain(row), outcome.chosen(row)
    if gain is not None:
        cells.append(f"{gain:+.2g} {outcome.unit}")
    cells.append(percent(row.operations / max(1, outcome.operations)))
    if chosen:
        cells.append(CellParts(text=chosen, badge=f"precision {chosen}"))
    return cells


def _bars(outcome: SensitivityOutcome, row: SensitivityRow) -> dict[str, object]:
    """One bar for each precision, as long as its loss beside the largest of all."""
    losses = {name: outcome.table.loss(row, name) for name in outcome.precisions}
    largest = max(
        (outcome.table.loss(other, name) for other in outcome.table for name in losses), default=0.0
    )
    told = ", ".join(f"{name} {percent(outcome.share(row, name))}" for name in losses)
    blocks = [
        {
            "kind": name,
            "left": 0.0,
            "top": index * (HIGH + GAP),
            "width": WIDE * loss / largest if largest else 0.0,
            "height": HIGH,
        }
        for index, (name, loss) in enumerate(losses.items())
    ]
    high = len(losses) * (HIGH + GAP) - GAP
    return {"height": high, "label": f"Share of loss: {told}", "blocks": blocks}


def _score(outcome: SensitivityOutcome, value: float) -> str:
    digits = {"sqnr": 1, "mAP": 2}.get(outcome.table.metric)
    shown = number(value, 3) if digits is None else fixed(value, digits)
    return f"{shown} {outcome.unit}"
