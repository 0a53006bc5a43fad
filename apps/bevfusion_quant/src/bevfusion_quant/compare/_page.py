"""The comparison as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bev_data.metrics import accuracy_notes, nds_title, points, span
from bevfusion_quant.compare._text import setting_text
from bevfusion_quant.report import ReportContent, Section, write_page
from bevfusion_quant.report._format import count
from bevfusion_quant.report._html import Html, tag
from bevfusion_quant.report._overview import head, reproduce

if TYPE_CHECKING:
    from bev_data.metrics import Difference, Interval, ModelAccuracy
    from bevfusion_quant.compare._outcome import Comparison
    from bevfusion_quant.run import RunRecord

__all__ = ["comparison_section", "write_comparison_page"]

DASH = "–"
HOW_TO_READ = (
    "mAP is nuScenes' mean average precision, in points of 100, its interval below it. Less float: "
    "the difference on the same frames, its interval from the same draws for both; the bar is that "
    "interval, the mark in it the difference, the line float."
)
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
    content = ReportContent(
        title=title,
        config=settings.config,
        frames=frames,
        **record.on_page(
            {
                "runs": ", ".join(run.folder for run in comparison.runs),
                "weights": settings.weights,
            }
        ),
    )
    again = reproduce(content)
    sections = [comparison_section(comparison), *([] if again is None else [again])]
    return write_page(record.folder / "report.html", title, head(content), sections)


def comparison_section(comparison: Comparison) -> Section:
    """Every model beside float, class by class, and in what the runs differ."""
    told = " ".join((*accuracy_notes(comparison.accuracy), *comparison.left_out()))
    html = tag(
        "div",
        tag("p", told, " ", HOW_TO_READ, class_="note about"),
        _wide("Every model beside float", _headline(comparison)),
        _wide("Average precision, class by class", _classes(comparison)),
        _wide("In what the runs differ", _settings(comparison)),
        class_="comparison",
    )
    return Section("comparison", "Comparison", html)


def _headline(comparison: Comparison) -> Html:
    accuracy = comparison.accuracy
    reach = max(map(_reach, accuracy.models), default=0.0)
    scale = f"{-100 * reach:+.2f} to {100 * reach:+.2f}" if reach else ""
    heads = ("Model", "mAP, of 100", "Less float", scale, nds_title(accuracy))
    rows = (
        tag(
            "tr",
            tag("th", entry.model, scope="row"),
            tag("td", _with_interval(points(entry.metrics.mean_ap), entry.metrics.interval)),
            tag("td", _apart(entry.difference)),
            tag("td", _bar(entry.difference, reach), class_="bars"),
            tag("td", points(entry.metrics.nds)),
        )
        for entry in accuracy.models
    )
    return _table("Every model beside float", heads, rows)


def _classes(comparison: Comparison) -> Html:
    accuracy = comparison.accuracy
    labelled = [(i, row) for i, row in enumerate(accuracy.reference.classes) if row.labels]
    heads = ("AP of 100", *(f"{row.name} ({count(row.labels)})" for _, row in labelled))
    rows = (
        tag(
            "tr",
            tag("th", entry.model, scope="row"),
            *(tag("td", points(entry.metrics.classes[i].mean_ap)) for i, _ in labelled),
        )
        for entry in accuracy.models
    )
    return _table("Average precision, class by class; labels in brackets", heads, rows)


def _settings(comparison: Comparison) -> Html:
    titles = comparison.differing()
    rows = (
        tag(
            "tr",
            tag("th", run.name, scope="row"),
            *(tag("td", setting_text(run.told()[title])) for title in titles),
            tag("td", tag("code", run.folder)),
        )
        for run in comparison.runs
    )
    return _table("In what the runs differ", ("Run", *map(str.capitalize, titles), "Folder"), rows)


def _apart(apart: Difference | None) -> Html | str:
    if apart is None or apart.mean_ap is None:
        return DASH
    return _with_interval(f"{100 * apart.mean_ap:+.2f}", apart.interval, signed=True)


def _with_interval(value: str, interval: Interval | None, *, signed: bool = False) -> Html | str:
    if interval is None:
        return value
    return tag("span", value, tag("small", span(interval, signed=signed)), class_="with-interval")


def _reach(entry: ModelAccuracy) -> float:
    """The farthest from 0 that the difference or its interval lies."""
    apart = entry.difference
    if apart is None or apart.mean_ap is None:
        return 0.0
    ends = [apart.mean_ap]
    if apart.interval is not None:
        ends += [apart.interval.low, apart.interval.high]
    return max(abs(end) for end in ends)


def _bar(apart: Difference | None, reach: float) -> Html | None:
    """The interval of the difference on a line with 0 in the middle, the same for every model."""
    if apart is None or apart.mean_ap is None or not reach:
        return None

    def place(value: float) -> float:
        return WIDE / 2 * (1 + value / reach)

    def block(kind: str, low: float, width: float, high: float) -> Html:
        return tag("rect", x=f"{low:.2f}", y=f"{(HIGH - high) / 2:g}", width=f"{width:.2f}",
                   height=f"{high:g}", class_=kind)  # fmt: skip

    blocks = [block("zero", WIDE / 2 - 0.15, 0.3, HIGH)]
    if apart.interval is not None:
        low, high = place(apart.interval.low), place(apart.interval.high)
        blocks.append(block("span", low, high - low, 4.0))
    blocks.append(block("mark", place(apart.mean_ap) - 0.5, 1.0, 9.0))
    return tag(
        "svg",
        *blocks,
        viewBox=f"0 0 {WIDE:g} {HIGH:g}",
        preserveAspectRatio="none",
        height=f"{HIGH:g}",
        role="img",
        aria_label=f"Less float {100 * apart.mean_ap:+.2f} points, from "
        f"{-100 * reach:.2f} to {100 * reach:.2f}",
    )


def _wide(label: str, table: Html) -> Html:
    return tag("div", table, class_="wide-table", tabindex=0, role="region", aria_label=label)


def _table(title: str, heads: Sequence[str], rows: Iterator[Html]) -> Html:
    return tag(
        "table",
        tag("caption", title),
        tag("thead", tag("tr", *(tag("th", text, scope="col") for text in heads))),
        tag("tbody", *rows),
        class_="pairs classes",
    )
