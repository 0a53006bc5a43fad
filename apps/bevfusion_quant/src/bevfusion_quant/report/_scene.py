"""The scene: points and boxes from above, boxes in the cameras' pictures."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from bevfusion_quant.report._birds_eye import birds_eye, heights
from bevfusion_quant.report._camera_views import camera_views
from bevfusion_quant.report._html import Html, tag
from bevfusion_quant.report._section import Section

if TYPE_CHECKING:
    from bevfusion_quant.report._content import ReportBoxes, ReportScene

__all__ = ["scene_section"]

SHOWN = 60  # detections, about what a person can still tell apart
SETS = {
    "label": ("Labels", "labels"),
    "float": ("Float model", "float_detections"),
    "quantized": ("Quantized model", "quantized_detections"),
}


def scene_section(scene: ReportScene) -> Section:
    """Bird's-eye view, controls, classes, pictures."""
    sets = {kind: getattr(scene, name) for kind, (_, name) in SETS.items()}
    present = {kind: boxes for kind, boxes in sets.items() if boxes is not None}
    least = _least_score(scene)
    side = tag(
        "div",
        _controls(present, least) if present else None,
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


def _least_score(scene: ReportScene) -> float:
    """The score from which detections are shown at first: about sixty of the float model's."""
    for boxes in (scene.float_detections, scene.quantized_detections):
        if boxes is not None and boxes.scores is not None and len(boxes.scores) > SHOWN:
            falling = np.sort(np.asarray(boxes.scores, np.float64))[::-1]
            return float(min(0.95, np.ceil(falling[SHOWN] * 20) / 20))
    return 0.0


def _controls(present: dict[str, ReportBoxes], least: float) -> Html:
    """Which boxes are drawn: a switch for each set, a slider for the score."""
    switches = [
        tag(
            "label",
            tag("input", type="checkbox", checked=True, data_boxes=kind),
            tag("span", class_=f"swatch {kind}"),
            tag("span", f"{SETS[kind][0]} ({len(boxes.boxes)})"),
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
    """How many objects of each class each set has."""
    counts = {kind: Counter(_names(boxes, least)) for kind, boxes in present.items()}
    total: Counter[str] = sum(counts.values(), Counter())
    rows = [
        tag(
            "tr",
            tag("th", name, scope="row"),
            *(tag("td", str(c[name] or "–")) for c in counts.values()),
        )
        for name, _ in sorted(total.items(), key=lambda item: (-item[1], item[0]))
    ]
    scored = any(boxes.scores is not None for boxes in present.values())
    caption = "Objects by class" + (f", scores from {least:.2f}" if scored else "")
    return tag(
        "table",
        tag("caption", caption),
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
