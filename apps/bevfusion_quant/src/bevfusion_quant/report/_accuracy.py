"""What the models find of what is labelled: figures, curves, frames from above."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bev_data.metrics import ERROR_UNITS, accuracy_notes, nds_title, points, span
from bevfusion_quant.report._curves import curve_figures
from bevfusion_quant.report._format import count, fixed
from bevfusion_quant.report._html import Html, tag
from bevfusion_quant.report._section import Section
from bevfusion_quant.report._sketches import sketch_figures, sketched_models

if TYPE_CHECKING:
    from bev_data.metrics import Accuracy, Interval

__all__ = ["accuracy_section"]

HOW_TO_READ = (
    "Average precisions are in points of 100. AP at 0.5, 1, 2 and 4 m and the errors of true "
    "positives at 2 m are those of nuScenes' detection task, BEV AP that of KITTI over 40 recalls, "
    "all objects alike."
)
DASH = "–"


def accuracy_section(accuracy: Accuracy) -> Section:
    """Headline table, classes, curves, and the first frames from above."""
    html = tag(
        "div",
        tag("p", " ".join(accuracy_notes(accuracy)), " ", HOW_TO_READ, class_="note about"),
        tag("div", _headline(accuracy), _classes(accuracy), class_="columns"),
        tag("h3", "Precision over recall", class_="sub"),
        _legend([entry.model for entry in accuracy.models]),
        tag("div", *curve_figures(accuracy), class_="curves"),
        tag("h3", "First frames from above", class_="sub") if accuracy.sketches else None,
        _legend(["label", *sketched_models(accuracy)]) if accuracy.sketches else None,
        tag("div", *sketch_figures(accuracy), class_="sketches") if accuracy.sketches else None,
        class_="accuracy",
    )
    return Section("accuracy", "Accuracy", html)


def _headline(accuracy: Accuracy) -> Html:
    heads = ("Measure", *(entry.model.capitalize() for entry in accuracy.models))
    rows = [
        tag("tr", tag("th", name, scope="row"), *(tag("td", value) for value in values))
        for name, values in _measures(accuracy)
    ]
    return _table("All classes", heads, rows)


def _measures(accuracy: Accuracy) -> Iterator[tuple[str, list[Html | str]]]:
    entries = accuracy.models
    rows = [entry.metrics for entry in entries]
    yield "mAP", [_with_interval(points(row.mean_ap), row.interval) for row in rows]
    if len(entries) > 1:
        yield (
            f"mAP less {entries[0].model}",
            [
                DASH
                if entry.difference is None or entry.difference.mean_ap is None
                else _with_interval(
                    f"{100 * entry.difference.mean_ap:+.2f}", entry.difference.interval, True
                )
                for entry in entries
            ],
        )
    for distance in accuracy.rules.distances:
        yield f"AP, {distance:g} m", [points(row.average_precision[distance]) for row in rows]
    yield nds_title(accuracy), [points(row.nds) for row in rows]
    for error, unit in ERROR_UNITS.items():
        yield f"{error}, {unit}", [fixed(row.errors[error], 3) for row in rows]
    for overlap in accuracy.rules.overlaps:
        yield f"BEV AP, IoU {overlap:g}", [points(row.bev_ap[overlap]) for row in rows]


def _with_interval(value: str, interval: Interval | None, signed: bool = False) -> Html | str:
    if interval is None:
        return value
    return tag("span", value, tag("small", span(interval, signed=signed)), class_="with-interval")


def _classes(accuracy: Accuracy) -> Html:
    heads = ("Class", "Labels", *(entry.model.capitalize() for entry in accuracy.models))
    rows = [
        tag(
            "tr",
            tag("th", row.name, scope="row"),
            tag("td", count(row.labels)),
            *(tag("td", points(entry.metrics.classes[index].mean_ap)) for entry in accuracy.models),
        )
        for index, row in enumerate(accuracy.reference.classes)
        if row.labels
    ]
    return _table("Mean over distances, class by class", heads, rows)


def _legend(kinds: Sequence[str]) -> Html:
    lines = (tag("li", tag("span", class_=f"swatch {kind}"), kind) for kind in kinds)
    return tag("ul", *lines, class_="legend")


def _table(title: str, heads: Sequence[str], rows: Sequence[Html]) -> Html:
    """A box that scrolls where the table is wider than the page, as that of many models is."""
    table = tag(
        "table",
        tag("caption", title),
        tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))),
        tag("tbody", *rows),
        class_="pairs classes",
    )
    return tag("div", table, class_="wide-table", tabindex=0, role="region", aria_label=title)
