"""Precision over recall as small charts: the mean over classes, then class by class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bev_data.metrics import RECALLS, points
from bevfusion_quant.report._html import Html, tag

if TYPE_CHECKING:
    from bev_data.metrics import Accuracy

__all__ = ["curve_figures"]

Floats = npt.NDArray[np.float64]
LEFT, TOP, WIDE, HIGH = 24.0, 8.0, 190.0, 120.0  # the frame of a chart, in its own units


def curve_figures(accuracy: Accuracy) -> Iterator[Html]:
    """One figure for each distance, then one for each class with labels at the errors' distance."""
    for distance in accuracy.rules.distances:
        means = {
            entry.model: np.mean(
                [row.precision[distance] for row in entry.metrics.classes if row.labels], axis=0
            )
            for entry in accuracy.models
            if entry.metrics.labels
        }
        aps = {entry.model: entry.metrics.average_precision[distance] for entry in accuracy.models}
        yield _figure(f"All classes, {distance:g} m", means, aps)
    distance = accuracy.rules.error_distance
    for index, row in enumerate(accuracy.reference.classes):
        if row.labels:
            rows = {entry.model: entry.metrics.classes[index] for entry in accuracy.models}
            yield _figure(
                f"{row.name}, {distance:g} m",
                {model: of_class.precision[distance] for model, of_class in rows.items()},
                {model: of_class.average_precision[distance] for model, of_class in rows.items()},
            )


def _figure(title: str, curves: Mapping[str, Floats], aps: Mapping[str, float | None]) -> Html:
    told = ", ".join(f"{model} {points(ap)}" for model, ap in aps.items())
    drawing = tag(
        "svg",
        *_axes(),
        *(
            tag("path", d=_line(values), class_=f"curve {model}")
            for model, values in curves.items()
        ),
        viewBox=f"0 0 {LEFT + WIDE + 8:g} {TOP + HIGH + 26:g}",
        role="img",
        aria_label=f"Precision over recall, {title}; AP of 100: {told}",
    )
    caption = tag("figcaption", tag("strong", title), tag("span", f"AP {told}", class_="note"))
    return tag("figure", caption, drawing, class_="chart curve-chart")


def _axes() -> Iterator[Html]:
    for tick in (0.0, 0.5, 1.0):
        y, x = TOP + HIGH * (1 - tick), LEFT + WIDE * tick
        yield tag("path", d=f"M{LEFT:g} {y:g}h{WIDE:g}", class_="rule")
        if tick != 0.5:  # where the axis has its name
            yield tag("text", f"{tick:g}", x=LEFT - 5, y=y + 4, text_anchor="end")
        yield tag("text", f"{tick:g}", x=x, y=TOP + HIGH + 14, text_anchor="middle")
    yield tag("text", "recall", x=LEFT + WIDE * 0.75, y=TOP + HIGH + 14, text_anchor="middle")
    yield tag(
        "text", "precision", text_anchor="middle",
        transform=f"translate({LEFT - 8:g} {TOP + HIGH / 2:g}) rotate(-90)",
    )  # fmt: skip


def _line(precision: Floats) -> str:
    """The curve up to its largest recall, and from there straight down."""
    reached = np.flatnonzero(precision)
    last = int(reached[-1]) if len(reached) else 0
    xs = LEFT + WIDE * RECALLS[: last + 1]
    ys = TOP + HIGH * (1 - precision[: last + 1])
    return (
        "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys, strict=True))
        + f"V{TOP + HIGH:g}"
    )  # fmt: skip
