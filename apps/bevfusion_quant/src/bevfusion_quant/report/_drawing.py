"""Boxes as lines: footprints seen from above, wire frames in a camera's picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bev_data.cameras import Camera
from bevfusion_quant.report._content import Extent, ReportBoxes

Floats = npt.NDArray[np.floating[Any]]

# Bottom face counter-clockwise from front left, then the top face.
SIGNS = np.array(
    [(sx, sy, sz) for sz in (-1, 1) for sx, sy in ((1, 1), (-1, 1), (-1, -1), (1, -1))]
)
EDGES = (
    (0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4), (0, 4), (1, 5), (2, 6), (3, 7),
)  # fmt: skip
NEAR = 0.3  # metres before the lens where lines are cut


def from_above(
    extent: Extent, rings: range | tuple[int, ...], sets: Mapping[str, ReportBoxes]
) -> dict[str, Any]:
    """A drawing in metres, forward up: the car at (x, y), rings around it, footprints of boxes.

    Each box has a line from its middle to its front.
    """
    left, bottom, right, top = extent
    drawn = []
    for kind, boxes in sets.items():
        flat = _corners(boxes.boxes)[:, :4, :2] * (1, -1) + (-left, top)
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
        for index, eight in enumerate(_corners(boxes.boxes)):
            lines = _wire_frame(eight, camera)
            if lines:
                line = "".join(f"M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}" for a, b in lines)
                yield _box(kind, boxes, index, line, "")


def _box(kind: str, boxes: ReportBoxes, index: int, line: str, name: str) -> dict[str, Any]:
    """A box, and what it says of itself: class, whose it is, score, distance."""
    score = None if boxes.scores is None else float(boxes.scores[index])
    told = "" if score is None else f", score {score:.2f}"
    far = float(np.hypot(*boxes.boxes[index][:2]))
    title = f"{boxes.names[index]} ({kind}{told}), {far:.1f} m away"
    return {"kind": kind, "title": title, "line": line, "score": score, "name": name}


def _corners(boxes: Floats) -> Floats:
    """Corners [boxes, 8, 3] in metres; the first four are the footprint, the edge 3–0 its front."""
    half = boxes[:, None, 3:6] / 2 * SIGNS
    cos, sin = np.cos(boxes[:, 6:7]), np.sin(boxes[:, 6:7])
    x = half[..., 0] * cos - half[..., 1] * sin
    y = half[..., 0] * sin + half[..., 1] * cos
    turned: Floats = np.stack([x, y, half[..., 2]], -1) + boxes[:, None, :3]
    return turned


def _wire_frame(box_corners: Floats, camera: Camera) -> list[Floats]:
    """Lines [2, 2] in pixels (u, v) of one box; empty where no line touches the picture.

    Edges are cut at a plane just before the lens, so that what lies behind the camera does not
    come back mirrored.
    """
    seen = box_corners @ camera.lidar_to_camera[:3, :3].T + camera.lidar_to_camera[:3, 3]
    height, width = camera.image.shape[:2]
    lines, touches = [], False
    for a, b in EDGES:
        cut = _in_front(seen[a], seen[b])
        if cut is None:
            continue
        pixels = cut @ camera.intrinsics.T
        line: Floats = pixels[:, :2] / pixels[:, 2:]
        low, high = line.min(0), line.max(0)
        touches |= bool((high > 0).all() and low[0] < width and low[1] < height)
        lines.append(line)
    return lines if touches else []


def _in_front(a: Floats, b: Floats) -> Floats | None:
    if a[2] < NEAR and b[2] < NEAR:
        return None
    if a[2] < NEAR or b[2] < NEAR:
        middle = a + (b - a) * ((NEAR - a[2]) / (b[2] - a[2]))
        a, b = (middle, b) if a[2] < NEAR else (a, middle)
    return np.stack([a, b])
