"""Boxes as lines: footprints seen from above, wire frames in a camera's picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bev_data.boxes import box_corners
from bev_data.cameras import Camera, wire_frame
from bevfusion_quant.pages._content import Extent, ReportBoxes


def from_above(
    extent: Extent, rings: range | tuple[int, ...], sets: Mapping[str, ReportBoxes]
) -> dict[str, Any]:
    """A drawing in metres, forward up: the car at (x, y), rings around it, footprints of boxes.

    Each box has a line from its middle to its front.
    """
    left, bottom, right, top = extent
    drawn = []
    for kind, boxes in sets.items():
        flat = box_corners(boxes.boxes)[:, :4, :2] * (1, -1) + (-left, top)
        for index, outline in enumerate(flat):
            front = (outline[0] + outline[3]) / 2
            around = "L".join(f"{x:.2f} {y:.2f}" for x, y in outline)
            x, y = outline.mean(0)
            line = f"M{around}zM{x:.2f} {y:.2f}L{front[0]:.2f} {front[1]:.2f}"
            drawn.append(_box(kind, boxes, index, line, boxes.names[index]))
    size = {"width": right - left, "height": top - bottom, "x": -left, "y": top}
    return {**size, "rings": rings, "boxes": drawn}


def in_camera(camera: Camera, sets: Mapping[str, ReportBoxes]) -> Iterator[dict[str, Any]]:
    """The wire frames, in pixels, of the boxes that touch a camera's picture."""
    for kind, boxes in sets.items():
        for index, eight in enumerate(box_corners(boxes.boxes)):
            lines = wire_frame(eight, camera)
            if len(lines):
                line = "".join(f"M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}" for a, b in lines)
                yield _box(kind, boxes, index, line, "")


def _box(kind: str, boxes: ReportBoxes, index: int, line: str, name: str) -> dict[str, Any]:
    """A box, and what it says of itself: class, whose it is, score, distance."""
    score = None if boxes.scores is None else float(boxes.scores[index])
    score_text = "" if score is None else f", score {score:.2f}"
    far = float(np.hypot(*boxes.boxes[index][:2]))
    title = f"{boxes.names[index]} ({kind}{score_text}), {far:.1f} m away"
    return {"kind": kind, "title": title, "line": line, "score": score, "name": name}
