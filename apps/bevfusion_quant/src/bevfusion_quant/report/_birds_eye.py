"""Points as a height map, boxes as outlines on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bevfusion_quant.report._boxes import corners
from bevfusion_quant.report._encode import packed_shares
from bevfusion_quant.report._html import Html, tag

if TYPE_CHECKING:
    from bevfusion_quant.report._content import ReportBoxes, ReportScene

__all__ = ["birds_eye", "box_title", "heights", "outlines"]

CELLS = 480  # of the longer side


def birds_eye(scene: ReportScene, present: Mapping[str, ReportBoxes]) -> Html:
    """A canvas for the points under a drawing of rings and boxes, forward up."""
    left, bottom, right, top = scene.extent
    width, height = right - left, top - bottom
    step = 10 if max(width, height) <= 60 else 20
    rings = [
        tag("circle", cx=f"{-left:g}", cy=f"{top:g}", r=r, class_="ring")
        for r in range(step, int(max(width, height) * 0.75), step)
    ]
    ego = tag("path", d=f"M{-left:g} {top - 2.2:g}l1.3 3.6h-2.6z", class_="ego")
    drawn = [box for kind, boxes in present.items() for box in outlines(kind, boxes, left, top)]
    counted = ", ".join(f"{len(boxes.boxes)} of {kind}" for kind, boxes in present.items())
    drawing = tag(
        "svg",
        *rings,
        ego,
        *drawn,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=f"Bird's-eye view of {scene.name}; boxes: {counted or 'none'}",
    )
    canvas = tag("canvas", id="scene-canvas", width=1, height=1, aria_hidden="true")
    caption = (
        f"{len(scene.points):,} {scene.kind} of {scene.name} from above, forward is up, a ring "
        f"every {step} m. Shade: height of the highest in a cell."
    )
    return tag(
        "figure",
        tag("div", canvas, drawing, class_="stack", style=f"aspect-ratio:{width:g}/{height:g}"),
        tag("figcaption", caption),
        class_="birds-eye",
    )


def heights(scene: ReportScene) -> dict[str, Any]:
    """Height of the highest point of each cell, as a share of the scene's usual heights."""
    left, bottom, right, top = scene.extent
    cell = max(right - left, top - bottom) / CELLS
    points = np.asarray(scene.points, np.float64)[:, :3]
    points = points[np.isfinite(points).all(1)]
    columns = np.floor((points[:, 0] - left) / cell).astype(np.int64)
    rows = np.floor((top - points[:, 1]) / cell).astype(np.int64)
    shape = (max(1, round((top - bottom) / cell)), max(1, round((right - left) / cell)))
    inside = (columns >= 0) & (columns < shape[1]) & (rows >= 0) & (rows < shape[0])
    highest = np.full(shape, -np.inf)
    z = points[inside, 2]
    np.maximum.at(highest, (rows[inside], columns[inside]), z)
    low, high = np.percentile(z, [2, 98]) if len(z) else (0.0, 1.0)
    shares: npt.NDArray[np.float64] = (highest - low) / max(high - low, 1e-6)
    return packed_shares(shares)


def box_title(kind: str, boxes: ReportBoxes, index: int) -> str:
    """What a box says of itself: class, whose it is, score, distance."""
    score = "" if boxes.scores is None else f", score {float(boxes.scores[index]):.2f}"
    far = float(np.hypot(*boxes.boxes[index][:2]))
    return f"{boxes.names[index]} ({kind}{score}), {far:.1f} m away"


def outlines(kind: str, boxes: ReportBoxes, left: float, top: float) -> Iterator[Html]:
    """Each box's footprint, with a line from its middle to its front."""
    flat = corners(boxes.boxes)[:, :4, :2]
    for index, outline in enumerate(flat * (1, -1) + (-left, top)):
        front = (outline[0] + outline[3]) / 2
        around = "L".join(f"{x:.2f} {y:.2f}" for x, y in outline)
        x, y = outline.mean(0)
        path = f"M{around}zM{x:.2f} {y:.2f}L{front[0]:.2f} {front[1]:.2f}"
        score = None if boxes.scores is None else f"{float(boxes.scores[index]):.3f}"
        yield tag(
            "g",
            tag("title", box_title(kind, boxes, index)),
            tag("path", d=path),
            class_=f"box {kind}",
            data_score=score,
            data_name=boxes.names[index],
        )
