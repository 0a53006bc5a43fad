"""The scene: points and boxes from above, boxes in the cameras' pictures."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bevfusion_quant.report._birds_eye import birds_eye, heights
from bevfusion_quant.report._camera_views import camera_views
from bevfusion_quant.report._content import ReportBoxes
from bevfusion_quant.report._html import Html, tag
from bevfusion_quant.report._section import Section

if TYPE_CHECKING:
    from bevfusion_quant.report._content import ReportScene

__all__ = ["scene_section"]

SHOWN = 60  # detections, about what a person can still tell apart
SETS = {
    "label": ("Labels", "labels"),
    "float": ("Float model", "float_detections"),
    "quantized": ("Quantized model", "quantized_detections"),
    "integer": ("Integer model", "integer_detections"),
}


def scene_section(scene: ReportScene) -> Section:
    """Bird's-eye view, controls, classes, pictures."""
    sets = {kind: getattr(scene, name) for kind, (_, name) in SETS.items()}
    present = {kind: _drawable(boxes) for kind, boxes in sets.items() if boxes is not None}
    broken = {kind: len(sets[kind].boxes) - len(boxes.boxes) for kind, boxes in present.items()}
    least = _least_score(present)
    side = tag(
        "div",
        _controls(present, broken, least) if present else None,
        _classes(present, least) if present else None,
        class_="scene-side",
    )
    html = tag(
        "div",
        tag("div", birds_eye(scene, present), side, class_="scene-top"),
        camera_views(scene, present) if len(scene.cameras) else None,
        id="scene-view",
    )
    return Section("scene", "Scene", html, {"heights": heights(scene)})


def _drawable(boxes: ReportBoxes) -> ReportBoxes:
    """The boxes without those that hold NaN or infinity, as arrays of float64."""
    values = np.asarray(boxes.boxes, np.float64)
    keep: npt.NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(values), axis=1)
    scores = None if boxes.scores is None else np.asarray(boxes.scores, np.float64)
    if scores is not None:
        keep = keep & np.isfinite(scores)
    names = [name for name, kept in zip(boxes.names, keep, strict=True) if kept]
    return ReportBoxes(values[keep], names, None if scores is None else scores[keep])


def _least_score(present: dict[str, ReportBoxes]) -> float:
    """The score from which detections are shown at first: about sixty of the float model's."""
    for kind in ("float", "quantized"):
        boxes = present.get(kind)
        if boxes is not None and boxes.scores is not None and len(boxes.scores) > SHOWN:
            falling = np.sort(boxes.scores)[::-1]
            return float(min(0.95, np.ceil(falling[SHOWN] * 20) / 20))
    return 0.0


def _controls(present: dict[str, ReportBoxes], broken: dict[str, int], least: float) -> Html:
    """Which boxes are drawn: a switch for each set, a slider for the score."""
    switches = [
        tag(
            "label",
            tag("input", type="checkbox", checked=True, data_boxes=kind),
            tag("span", class_=f"swatch {kind}"),
            tag("span", f"{SETS[kind][0]} ({len(boxes.boxes)})"),
            tag("span", f"and {broken[kind]} not finite", class_="low") if broken[kind] else None,
            class_="switch",
        )
        for kind, boxes in present.items()
    ]
    scored = any(boxes.scores is not None for boxes in present.values())
    slider = tag(
        "label",
        tag("span", "Score from"),
        tag("input", type="range", min=0, max=0.95, step=0.05, value=f"{least:g}", id="score"),
        tag("output", f"{least:.2f}", for_="score", id="score-shown"),
        class_="slider",
    )
    return tag(
        "fieldset",
        tag("legend", "Boxes"),
        *switches,
        slider if scored else None,
        class_="controls",
    )


def _classes(present: dict[str, ReportBoxes], least: float) -> Html:
    """How many objects of each class each set has; the page's script counts again by score."""
    counts = {kind: Counter(_names(boxes, least)) for kind, boxes in present.items()}
    total = {
        name: sum(c[name] for c in counts.values()) for s in present.values() for name in s.names
    }
    rows = [
        tag(
            "tr",
            tag("th", name, scope="row"),
            *(tag("td", str(c[name] or "–"), data_kind=kind) for kind, c in counts.items()),
            data_name=name,
        )
        for name, _ in sorted(total.items(), key=lambda item: (-item[1], item[0]))
    ]
    scored = any(boxes.scores is not None for boxes in present.values())
    note = tag("span", f", scores from {least:.2f}", id="classes-score") if scored else None
    return tag(
        "table",
        tag("caption", "Objects by class", note),
        tag(
            "thead",
            tag(
                "tr",
                tag("th", "Class", scope="col"),
                *(tag("th", SETS[kind][0].split()[0], scope="col") for kind in present),
            ),
        ),
        tag("tbody", *rows),
        class_="pairs classes",
    )


def _names(boxes: ReportBoxes, least: float) -> list[str]:
    if boxes.scores is None:
        return list(boxes.names)
    return [n for n, s in zip(boxes.names, boxes.scores, strict=True) if s >= least]
