"""A few frames from above: what is labelled, and what each model finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from bevfusion_quant.report._birds_eye import outlines
from bevfusion_quant.report._content import ReportBoxes
from bevfusion_quant.report._html import Html, tag

if TYPE_CHECKING:
    from bev_data.metrics import Accuracy, Sketch
    from bevfusion.model.head import Detections

__all__ = ["sketch_figures", "sketched_models"]

REACH = 55.0  # metres to each side


def sketched_models(accuracy: Accuracy) -> tuple[str, ...]:
    """The first model and the last: more boxes on one spot nobody can tell apart."""
    first, *others = (entry.model for entry in accuracy.models)
    return (first, *others[-1:])


def sketch_figures(accuracy: Accuracy) -> Iterator[Html]:
    """One figure for each frame.

    Of each model as many of the best detections are drawn as there are labels, so that a model
    that finds everything draws one box on each of them.
    """
    side, models = 2 * REACH, sketched_models(accuracy)
    for sketch in accuracy.sketches:
        labels = _labels(sketch, accuracy.classes)
        drawn = list(outlines("label", labels, -REACH, REACH))
        for model in models:
            boxes = _best(sketch.found[model], accuracy.classes, len(labels.boxes))
            drawn += outlines(model, boxes, -REACH, REACH)
        rings = [
            tag("circle", cx=f"{REACH:g}", cy=f"{REACH:g}", r=r, class_="ring") for r in (20, 40)
        ]
        ego = tag("path", d=f"M{REACH:g} {REACH - 2.2:g}l1.3 3.6h-2.6z", class_="ego")
        many = f"{len(labels.boxes)} label{'s' * (len(labels.boxes) != 1)}"
        drawing = tag(
            "svg", *rings, ego, *drawn,
            viewBox=f"0 0 {side:g} {side:g}", role="img",
            aria_label=f"Boxes in {sketch.frame} from above: {many}, "
            f"as many of the best detections of {' and '.join(models)}",
        )  # fmt: skip
        caption = tag("figcaption", f"{sketch.frame}, {many}, and as many best detections")
        yield tag("figure", tag("div", drawing, class_="sketch"), caption)


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
