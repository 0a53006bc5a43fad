"""Detected boxes, nuScenes' classes, overlap seen from above, points inside."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numba
import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError

__all__ = [
    "BOX_EDGES", "NUSCENES_CLASSES", "Detections", "box_corners", "checked_boxes", "count_inside",
    "in_box", "rotated_iou",
]  # fmt: skip

Floats = npt.NDArray[np.float64]
NUSCENES_CLASSES = (
    "car", "truck", "construction_vehicle", "bus", "trailer",
    "barrier", "motorcycle", "bicycle", "pedestrian", "traffic_cone",
)  # fmt: skip


class Detections(NamedTuple):
    """Detections of one frame, best score first.

    Attributes:
        boxes: float32 [n, 7]: centre x, y, z, length, width, height [m] and yaw [rad, −π to π],
            counter-clockwise from +x to the direction of the length, as in `points.Labels`.
        scores: float32 [n], from 0 to 1.
        labels: int64 [n], numbers of the model's classes. Default: `NUSCENES_CLASSES`.
        velocities: float32 [n, 2] along x and y [m/s].
    """

    boxes: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    velocities: npt.NDArray[np.float32]

    @classmethod
    def of_rows(cls, rows: Any, boxes: Any, scores: Any, labels: Any, velocities: Any) -> Self:
        """These rows of arrays of other number types, in this order."""
        boxes, scores, velocities = (
            part[rows].astype(np.float32) for part in (boxes, scores, velocities)
        )
        return cls(boxes, scores, labels[rows].astype(np.int64), velocities)


def rotated_iou(a: npt.ArrayLike, b: npt.ArrayLike) -> Floats:
    """Intersection over union of all pairs of boxes, seen from above.

    The intersection of two rectangles is a convex polygon; it is found by clipping one at the
    four sides of the other (Sutherland and Hodgman 1974), in float64, around the first box's
    centre so that far-away boxes lose no digits. The area is the shoelace formula's.

    Args:
        a: [n, 7], boxes as in `Detections`; z and height do not count.
        b: [m, 7].

    Returns:
        float64 [n, m], from 0 to 1; 0 where either box has no area.

    Raises:
        InputError: NaN, infinity, a negative size, or other columns.

    Example:
        >>> rotated_iou([[0, 0, 0, 4, 2, 1, 0]], [[1, 0, 0, 4, 2, 1, 0]]).round(3).tolist()
        [[0.6]]
    """
    first, second = checked_boxes("rotated_iou", a), checked_boxes("rotated_iou", b)
    overlaps: Floats = _pairs(first, second)
    return overlaps


def checked_boxes(what: str, boxes: npt.ArrayLike) -> Floats:
    """`boxes` as float64 [n, 7], or an InputError that names the rows at fault."""
    rows = np.ascontiguousarray(boxes, np.float64)
    if rows.size == 0:
        return np.zeros((0, 7))
    if rows.ndim != 2 or rows.shape[1] != 7:
        raise InputError(
            f"{what}: boxes must be [n, 7] (x, y, z, length, width, height, yaw), not "
            f"{list(rows.shape)}"
        )
    wrong = ~np.isfinite(rows).all(1) | (rows[:, 3:5] < 0).any(1)
    if wrong.any():
        raise InputError(
            f"{what}: boxes in rows {np.flatnonzero(wrong).tolist()} hold NaN, infinity or a "
            "negative size; drop these rows first"
        )
    return rows


_SIGNS = np.array(
    [(sx, sy, sz) for sz in (-1, 1) for sx, sy in ((1, 1), (-1, 1), (-1, -1), (1, -1))]
)
BOX_EDGES = (
    (0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4), (0, 4), (1, 5), (2, 6), (3, 7),
)  # fmt: skip
"""The edges of a box, each two of its `box_corners`."""


def box_corners(boxes: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.floating[Any]]:
    """Corners of boxes.

    Args:
        boxes: [n, 7], as in `Detections`.

    Returns:
        [n, 8, 3] in metres: the foot counter-clockwise from front left, so that the edge from 3 to
        0 is its front, then the top.

    Example:
        >>> box_corners(np.array([[0.0, 0, 0, 4, 2, 1, 0]]))[0, [0, 3, 4]].tolist()
        [[2.0, 1.0, -0.5], [2.0, -1.0, -0.5], [2.0, 1.0, 0.5]]
    """
    half = boxes[:, None, 3:6] / 2 * _SIGNS
    cos, sin = np.cos(boxes[:, 6:7]), np.sin(boxes[:, 6:7])
    x = half[..., 0] * cos - half[..., 1] * sin
    y = half[..., 0] * sin + half[..., 1] * cos
    turned: npt.NDArray[np.floating[Any]] = np.stack([x, y, half[..., 2]], -1)
    return turned + boxes[:, None, :3]


def count_inside(
    points: npt.NDArray[np.float32], boxes: npt.NDArray[np.float32]
) -> npt.NDArray[np.int32]:
    """Points in each box, its faces included.

    Args:
        points: [points, 3 or more], x, y, z [m].
        boxes: [boxes, 7], as in `points.Labels`.

    Returns:
        int32 [boxes].
    """
    counts = np.zeros(len(boxes), np.int32)
    order = np.argsort(points[:, 0], kind="stable")  # a box then looks at a strip of the cloud
    x = points[order, 0]
    for k, (cx, _, _, length, width, *_) in enumerate(boxes.astype(np.float64)):
        reach = np.hypot(length, width) / 2
        first, last = np.searchsorted(x, [cx - reach, cx + reach])
        counts[k] = np.count_nonzero(in_box(points[order[first:last]], boxes[k]))
    return counts


def in_box(
    points: npt.NDArray[np.floating[Any]], box: npt.NDArray[np.floating[Any]]
) -> npt.NDArray[np.bool_]:
    """Which points [n, 3 or more] lie in a box [7], its faces included: bool [n]."""
    cx, cy, cz, length, width, height, yaw = box.astype(np.float64)
    x, y, z = (points[:, :3] - [cx, cy, cz]).T
    c, s = np.cos(yaw), np.sin(yaw)
    along, across = np.abs(x * c + y * s), np.abs(y * c - x * s)
    inside: npt.NDArray[np.bool_] = (
        (along <= length / 2) & (across <= width / 2) & (np.abs(z) <= height / 2)
    )
    return inside


@numba.njit(cache=True)
def _pairs(a: Any, b: Any) -> Any:
    overlaps = np.zeros((len(a), len(b)))
    for i in range(len(a)):
        for j in range(len(b)):
            dx, dy = b[j, 0] - a[i, 0], b[j, 1] - a[i, 1]
            reach = 0.5 * (np.hypot(a[i, 3], a[i, 4]) + np.hypot(b[j, 3], b[j, 4]))
            smaller = min(a[i, 3] * a[i, 4], b[j, 3] * b[j, 4])
            if smaller > 0.0 and np.hypot(dx, dy) < reach:
                area = _intersection(a[i], b[j], dx, dy)
                # Rounding may exceed the smaller box by an ulp or so.
                area = min(area, smaller)
                union = a[i, 3] * a[i, 4] + b[j, 3] * b[j, 4] - area
                overlaps[i, j] = area / union
    return overlaps


@numba.njit(cache=True)
def _intersection(a: Any, b: Any, dx: float, dy: float) -> Any:
    """Area common to box `a` and box `b`, whose centre is (dx, dy) from that of `a`."""
    # In the frame of `a`, whose sides are at ±length/2 and ±width/2: a cut compares one coordinate.
    cos_a, sin_a = np.cos(a[6]), np.sin(a[6])
    cos, sin = np.cos(b[6] - a[6]), np.sin(b[6] - a[6])
    center_x, center_y = cos_a * dx + sin_a * dy, cos_a * dy - sin_a * dx
    # A cut adds one corner to a convex polygon. Rounding may make it not quite convex; a cut then
    # doubles the corners at worst, 4 · 2⁴ of them in the end.
    polygon = np.empty((64, 2))
    for corner in range(4):  # counter-clockwise
        along = 0.5 * b[3] if corner == 0 or corner == 3 else -0.5 * b[3]
        across = 0.5 * b[4] if corner < 2 else -0.5 * b[4]
        polygon[corner, 0] = center_x + cos * along - sin * across
        polygon[corner, 1] = center_y + sin * along + cos * across
    count = 4
    clipped = np.empty((64, 2))
    for axis in range(2):
        for sign in (1.0, -1.0):
            kept = 0
            for k in range(count):
                p, q = polygon[k], polygon[(k + 1) % count]
                inside_p = 0.5 * a[3 + axis] - sign * p[axis]
                inside_q = 0.5 * a[3 + axis] - sign * q[axis]
                if inside_p >= 0.0:
                    clipped[kept] = p
                    kept += 1
                if (inside_p > 0.0 and inside_q < 0.0) or (inside_p < 0.0 and inside_q > 0.0):
                    t = inside_p / (inside_p - inside_q)
                    clipped[kept] = p + t * (q - p)
                    kept += 1
            polygon, clipped, count = clipped, polygon, kept
            if count < 3:
                return 0.0
    area = 0.0
    for k in range(count):
        p, q = polygon[k], polygon[(k + 1) % count]
        area += p[0] * q[1] - q[0] * p[1]
    return max(0.0, 0.5 * area)
