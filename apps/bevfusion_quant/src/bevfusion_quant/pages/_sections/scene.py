"""The scene: points and boxes from above, boxes in the cameras' pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bev_data.cameras import Camera
from bev_data.tables import Column, Row, Table
from bevfusion_quant.pages._content import ReportBoxes, ReportContent, ReportScene, arranged
from bevfusion_quant.pages._format import from_above, in_camera, jpeg, packed_shares
from bevfusion_quant.pages._page import Section

ORDER = 10
SHOWN = 60  # detections, about what a person can still tell apart
CELLS = 480  # of the height map's longer side
WIDTH = 800  # of a camera's picture
SETS = {
    "label": ("Labels", "labels"),
    "float": ("Float model", "float_detections"),
    "quantized": ("Quantized model", "quantized_detections"),
    "integer": ("Integer model", "integer_detections"),
}


def section(content: ReportContent) -> Section | None:
    """Bird's-eye view, switches, classes, pictures."""
    scene = content.scene
    if scene is None:
        return None
    sets = {kind: getattr(scene, name) for kind, (_, name) in SETS.items()}
    present = {kind: _drawable(boxes) for kind, boxes in sets.items() if boxes is not None}
    left, bottom, right, top = scene.extent
    longer = max(right - left, top - bottom)
    step = 10 if longer <= 60 else 20
    order = arranged([camera.name for camera in scene.cameras])
    least = _least_score(present)
    data = {
        "name": scene.name,
        "kind": scene.kind,
        "points": len(scene.points),
        "step": step,
        "view": from_above(scene.extent, range(step, int(longer * 0.75), step), present),
        "sets": [
            {
                "kind": kind,
                "title": SETS[kind][0],
                "count": len(boxes.boxes),
                "broken": len(sets[kind].boxes) - len(boxes.boxes),
            }
            for kind, boxes in present.items()
        ],
        "least": least,
        "scored": any(boxes.scores is not None for boxes in present.values()),
        "classes": _classes(present, least),
        "cameras": [_camera(scene.cameras[index], present) for index in order],
    }
    return Section("scene", "Scene", data, {"heights": _heights(scene)})


def _drawable(boxes: ReportBoxes) -> ReportBoxes:
    """The boxes without NaN or infinity, as arrays of float64."""
    values = np.asarray(boxes.boxes, np.float64)
    keep: npt.NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(values), axis=1)
    scores = None if boxes.scores is None else np.asarray(boxes.scores, np.float64)
    if scores is not None:
        keep = keep & np.isfinite(scores)
    names = [name for name, kept in zip(boxes.names, keep, strict=True) if kept]
    return ReportBoxes(values[keep], names, None if scores is None else scores[keep])


def _least_score(present: Mapping[str, ReportBoxes]) -> float:
    """Initial score threshold: shows about sixty of the float model's detections."""
    for kind in ("float", "quantized"):
        boxes = present.get(kind)
        if boxes is not None and boxes.scores is not None and len(boxes.scores) > SHOWN:
            falling = np.sort(boxes.scores)[::-1]
            least = min(0.95, float(np.ceil(falling[SHOWN] * 20) / 20))
            return least if least <= falling[0] else float(np.floor(falling[SHOWN] * 20) / 20)
    return 0.0


def _classes(present: Mapping[str, ReportBoxes], least: float) -> Table:
    """Number of objects by class and set; the page's script counts again by score."""
    counts = {kind: Counter(_names(boxes, least)) for kind, boxes in present.items()}
    total = {
        name: sum(c[name] for c in counts.values()) for s in present.values() for name in s.names
    }
    heads = [Column("Class"), *(Column(SETS[k][0].split()[0], key=k) for k in present)]
    rows = [
        Row([name, *(str(c[name] or "–") for c in counts.values())], name=name)
        for name, _ in sorted(total.items(), key=lambda item: (-item[1], item[0]))
    ]
    return Table("Objects by class", heads, rows)


def _names(boxes: ReportBoxes, least: float) -> list[str]:
    if boxes.scores is None:
        return list(boxes.names)
    return [n for n, s in zip(boxes.names, boxes.scores, strict=True) if s >= least]


def _camera(camera: Camera, present: Mapping[str, ReportBoxes]) -> dict[str, Any]:
    picture, shown_width, shown_height = jpeg(camera.image, WIDTH)
    height, width = camera.image.shape[:2]
    return {
        "name": camera.name.removeprefix("CAM_").replace("_", " ").lower(),
        "picture": picture,
        "shown": (shown_width, shown_height),
        "size": (width, height),
        "boxes": list(in_camera(camera, present)),
    }


def _heights(scene: ReportScene) -> dict[str, Any]:
    """Height of the highest point of each cell, relative to the scene's usual heights."""
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
