"""Non-maximum suppression in the bird's-eye view."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bev_data import InputError
from bev_data.boxes import checked_boxes, rotated_iou

__all__ = ["circle_nms", "rotated_nms"]


def circle_nms(
    centers: npt.ArrayLike, scores: npt.ArrayLike, radius: float
) -> npt.NDArray[np.int64]:
    """Of objects whose centres are no farther than `radius` apart, keep the best.

    Greedy: the best score is kept and suppresses those near it, then the best of the rest. Of
    equal scores the earlier row counts as better.

    Args:
        centers: [n, 2], x and y [m].
        scores: [n].
        radius: In metres, not squared.

    Returns:
        Rows that stay, best first.

    Raises:
        InputError: NaN, infinity, or shapes that do not fit.

    Example:
        >>> circle_nms([[0, 0], [0.3, 0], [5, 0]], [0.5, 0.9, 0.1], radius=0.4)
        array([1, 2])
    """
    points = np.asarray(centers, np.float64).reshape(-1, 2)
    finite = np.isfinite(points).all(1)
    if not finite.all():
        raise InputError(
            f"circle_nms: the centres of rows {np.flatnonzero(~finite).tolist()} hold NaN or "
            "infinity; drop these rows first"
        )
    order = _best_first("circle_nms", scores, len(points))
    offset = points[order][:, None] - points[order][None]
    near = np.hypot(offset[..., 0], offset[..., 1]) <= radius
    return order[_greedy(near)]


def rotated_nms(
    boxes: npt.ArrayLike, scores: npt.ArrayLike, threshold: float
) -> npt.NDArray[np.int64]:
    """Of boxes that overlap by more than `threshold`, keep the best; see `circle_nms`.

    Args:
        boxes: [n, 7], as in `Detections`; height and z do not count.
        scores: [n].
        threshold: Intersection over union in the bird's-eye view, from 0 to 1. Boxes of no area
            overlap with nothing.

    Returns:
        Rows that stay, best first.

    Raises:
        InputError: NaN, infinity, negative sizes, or shapes that do not fit.

    Example:
        >>> car, same = [0, 0, 0, 4, 2, 1.5, 0], [0, 0, 0, 4, 2, 1.5, 3.1415927]
        >>> rotated_nms([car, same], [0.5, 0.9], threshold=0.2)
        array([1])
    """
    rows = checked_boxes("rotated_nms", boxes)
    order = _best_first("rotated_nms", scores, len(rows))
    return order[_greedy(rotated_iou(rows[order], rows[order]) > threshold)]


def _best_first(what: str, scores: npt.ArrayLike, count: int) -> npt.NDArray[np.int64]:
    values = np.asarray(scores, np.float64)
    if values.shape != (count,):
        raise InputError(f"{what}: {count} rows need as many scores, not {list(values.shape)}")
    if np.isnan(values).any():
        raise InputError(
            f"{what}: the scores of rows {np.flatnonzero(np.isnan(values)).tolist()} are NaN; "
            "drop these rows first"
        )
    return np.argsort(-values, kind="stable").astype(np.int64)


def _greedy(near: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Rows that no better row which stays is near to."""
    suppressed = np.zeros(len(near), bool)
    kept = []
    for row in range(len(near)):
        if not suppressed[row]:
            kept.append(row)
            suppressed |= near[row]
    return np.array(kept, np.int64)
