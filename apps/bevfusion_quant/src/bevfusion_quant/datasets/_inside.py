"""How many points a box holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["count_inside"]


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
    for k, (cx, cy, cz, length, width, height, yaw) in enumerate(boxes.astype(np.float64)):
        reach = np.hypot(length, width) / 2
        first, last = np.searchsorted(x, [cx - reach, cx + reach])
        px, py, pz = (points[order[first:last], :3] - [cx, cy, cz]).T
        c, s = np.cos(yaw), np.sin(yaw)
        counts[k] = np.count_nonzero(
            (np.abs(px * c + py * s) <= length / 2)
            & (np.abs(py * c - px * s) <= width / 2)
            & (np.abs(pz) <= height / 2)
        )
    return counts
