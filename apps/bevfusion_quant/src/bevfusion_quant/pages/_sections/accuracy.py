"""Detections against labels: figures, curves, frames from above."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bev_data.metrics import RECALLS, Accuracy, Sketch, accuracy_notes, measure_tables, points
from bevfusion.model.head import Detections
from bevfusion_quant.pages._content import ReportBoxes, ReportContent
from bevfusion_quant.pages._format import from_above
from bevfusion_quant.pages._page import Section

ORDER = 20
Floats = npt.NDArray[np.float64]
LEFT, TOP, WIDE, HIGH = 24.0, 8.0, 190.0, 120.0  # the frame of a chart, in its own units
REACH = 55.0  # metres to each side of a frame seen from above


def section(content: ReportContent) -> Section | None:
    """Headline table, classes, curves, and the first frames from above."""
    accuracy = content.accuracy
    if accuracy is None:
        return None
    names = [entry.model for entry in accuracy.models]
    headline, classes = measure_tables(accuracy)
    drawn = names[:1] + names[1:][-1:]  # more boxes on one spot nobody can tell apart
    data = {
        "notes": list(accuracy_notes(accuracy)),
        "headline": headline,
        "classes": classes,
        "models": names,
        "frame": {"left": LEFT, "top": TOP, "width": WIDE, "height": HIGH},
        "curves": list(_curves(accuracy)),
        "drawn": drawn,
        "sketches": [_sketch(sketch, accuracy, drawn) for sketch in accuracy.sketches],
    }
    return Section("accuracy", "Accuracy", data)


def _curves(accuracy: Accuracy) -> Iterator[dict[str, Any]]:
    """One chart per distance, then one per class with labels, at the distance of the errors."""
    for distance in accuracy.rules.distances:
        means = {
            entry.model: np.mean(
                [row.precision[distance] for row in entry.metrics.classes if row.labels], axis=0
            )
            for entry in accuracy.models
            if entry.metrics.labels
        }
        aps = {entry.model: entry.metrics.average_precision[distance] for entry in accuracy.models}
        yield _chart(f"All classes, {distance:g} m", means, aps)
    distance = accuracy.rules.error_distance
    for index, row in enumerate(accuracy.reference.classes):
        if row.labels:
            rows = {entry.model: entry.metrics.classes[index] for entry in accuracy.models}
            yield _chart(
                f"{row.name}, {distance:g} m",
                {model: of_class.precision[distance] for model, of_class in rows.items()},
                {model: of_class.average_precision[distance] for model, of_class in rows.items()},
            )


def _chart(
    title: str, curves: Mapping[str, Floats], aps: Mapping[str, float | None]
) -> dict[str, Any]:
    ap_text = ", ".join(f"{model} {points(ap)}" for model, ap in aps.items())
    lines = [{"model": model, "line": _line(values)} for model, values in curves.items()]
    return {"title": title, "told": ap_text, "lines": lines}


def _line(precision: Floats) -> str:
    """The curve up to its largest recall, then straight down."""
    reached = np.flatnonzero(precision)
    last = int(reached[-1]) if len(reached) else 0
    xs = LEFT + WIDE * RECALLS[: last + 1]
    ys = TOP + HIGH * (1 - precision[: last + 1])
    points_of = "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys, strict=True))
    return f"M{points_of}V{TOP + HIGH:g}"


def _sketch(sketch: Sketch, accuracy: Accuracy, models: list[str]) -> dict[str, Any]:
    """A frame with its labels and, for each model, as many of its best detections as labels."""
    labels = _labels(sketch, accuracy.classes)
    sets = {"label": labels}
    # A model that finds everything thus draws one box on each label.
    for model in models:
        sets[model] = _best(sketch.found[model], accuracy.classes, len(labels.boxes))
    view = from_above((-REACH, -REACH, REACH, REACH), (20, 40), sets)
    return {"frame": sketch.frame, "labels": len(labels.boxes), "view": view}


def _labels(sketch: Sketch, classes: tuple[str, ...]) -> ReportBoxes:
    labels = sketch.labels
    near = np.abs(labels.boxes[:, :2]).max(axis=1, initial=0) < REACH
    known = np.array([name in classes for name in labels.names], bool)
    if labels.num_points is not None:
        known &= labels.num_points > 0
    rows = np.flatnonzero(near & known)
    return ReportBoxes(labels.boxes[rows], [labels.names[row] for row in rows])


def _best(found: Detections, classes: tuple[str, ...], count: int) -> ReportBoxes:
    rows = np.argsort(-found.scores, kind="stable")[:count]
    return ReportBoxes(
        found.boxes[rows], [classes[n] for n in found.labels[rows]], found.scores[rows]
    )
