"""The comparison as tables, for its page and for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bev_data.metrics import accuracy_notes, nds_title, points
from bevfusion_quant.report import ReportContent, Section, head, reproduce, write_page
from bevfusion_quant.results import (
    CellParts,
    Column,
    Row,
    Table,
    mean_ap_apart,
    plain_table,
    setting_text,
    with_interval,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bev_data.metrics import Difference, ModelAccuracy
    from bevfusion_quant.compare._outcome import Comparison
    from bevfusion_quant.results import Cell
    from bevfusion_quant.run import RunRecord

__all__ = ["comparison_text", "write_comparison_page"]

WIDE, HIGH = 100.0, 12.0  # of a bar, in its own units


def write_comparison_page(
    record: RunRecord, title: str, comparison: Comparison, frames: Sequence[str]
) -> Path:
    """Write report.html: the tables, and how to repeat them.

    Args:
        record: Of the comparison.
        title: Its name.
        comparison: What was found.
        frames: Names of all frames.
    """
    settings = comparison.runs[0].settings
    told = {
        "runs": ", ".join(run.folder for run in comparison.runs),
        "weights": settings.weights,
    }
    content = ReportContent(
        title=title, config=settings.config, frames=frames, **record.on_page(told)
    )
    data = {
        "notes": _notes(comparison),
        "tables": [table.on_page() for table in _tables(comparison)],
    }
    again = reproduce(content)
    sections = [Section("comparison", "Comparison", data), *([] if again is None else [again])]
    return write_page(record.folder / "report.html", title, head(content), sections)


def comparison_text(comparison: Comparison) -> tuple[str, ...]:
    """Headline, classes, in what the runs differ, and what to know; a model a line."""
    tables = (table.text() for table in _tables(comparison))
    return (*tables, "\n".join(_notes(comparison)))


def _notes(comparison: Comparison) -> list[str]:
    return [*accuracy_notes(comparison.accuracy), *comparison.left_out()]


def _tables(comparison: Comparison) -> tuple[Table, Table, Table]:
    """Every model beside float, class by class, and in what the runs differ."""
    return _headline(comparison), _classes(comparison), _settings(comparison)


def _headline(comparison: Comparison) -> Table:
    accuracy = comparison.accuracy
    reach = max(map(_reach, accuracy.models), default=0.0)
    scale = f"{-100 * reach:+.2f} to {100 * reach:+.2f}" if reach else ""
    columns = [Column("Model"), Column("mAP, of 100"), Column("Less float")]
    columns += [Column(scale, "bars", only="page"), Column(nds_title(accuracy))]
    rows = [
        Row(
            (
                entry.model,
                with_interval(points(entry.metrics.mean_ap), entry.metrics.interval),
                mean_ap_apart(entry.difference),
                CellParts(bars=_bars(entry.difference, reach)),
                points(entry.metrics.nds),
            )
        )
        for entry in accuracy.models
    ]
    return Table("Every model beside float", columns, rows, "wide")


def _classes(comparison: Comparison) -> Table:
    accuracy = comparison.accuracy
    labelled = [(i, row) for i, row in enumerate(accuracy.reference.classes) if row.labels]
    heads = ("AP of 100", *(f"{row.name} ({row.labels:,})" for _, row in labelled))
    rows = [
        (entry.model, *(points(entry.metrics.classes[i].mean_ap) for i, _ in labelled))
        for entry in accuracy.models
    ]
    title = "Average precision, class by class; labels in brackets"
    return plain_table(title, heads, rows, form="wide")


def _settings(comparison: Comparison) -> Table:
    titles = comparison.differing()
    heads = ("Run", *map(str.capitalize, titles), "Folder")
    rows: list[Sequence[Cell]] = [
        (
            run.name,
            *(setting_text(run.told()[title]) for title in titles),
            CellParts(text=run.folder, code=True),
        )
        for run in comparison.runs
    ]
    return plain_table("In what the runs differ", heads, rows, form="wide")


def _reach(entry: ModelAccuracy) -> float:
    """The farthest from 0 that the difference or its interval lies."""
    apart = entry.difference
    if apart is None or apart.mean_ap is None:
        return 0.0
    ends = [apart.mean_ap]
    if apart.interval is not None:
        ends += [apart.interval.low, apart.interval.high]
    return max(abs(end) for end in ends)


def _bars(apart: Difference | None, reach: float) -> dict[str, Any] | None:
    """The interval of the difference on a line with 0 in the middle, the same for every model."""
    if apart is None or apart.mean_ap is None or not reach:
        return None

    def place(value: float) -> float:
        return WIDE / 2 * (1 + value / reach)

    def block(kind: str, left: float, width: float, high: float) -> dict[str, Any]:
        top = (HIGH - high) / 2
        return {"kind": kind, "left": left, "top": top, "width": width, "height": high}

    blocks = [block("zero", WIDE / 2 - 0.15, 0.3, HIGH)]
    if apart.interval is not None:
        low, high = place(apart.interval.low), place(apart.interval.high)
        blocks.append(block("span", low, high - low, 4.0))
    blocks.append(block("mark", place(apart.mean_ap) - 0.5, 1.0, 9.0))
    label = (
        f"Less float {100 * apart.mean_ap:+.2f} points, from {-100 * reach:.2f} to "
        f"{100 * reach:.2f}"
    )
    return {"height": HIGH, "label": label, "blocks": blocks}
