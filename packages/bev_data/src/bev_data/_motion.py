"""Rigid motions between sensor frames, applied to points and boxes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError

_Matrix = npt.NDArray[np.float64]
_OPPOSITE = {"right": "left", "forward": "back", "up": "down"}


def axes_motion(axes: str | Sequence[str]) -> _Matrix | None:
    """The motion to x right, y forward, z up from axes with these directions; None for the same.

    A left-handed frame, such as "forward,right,up", is mirrored: the matrix is orthogonal.

    Raises:
        InputError: other words, or not one of each pair.

    Example:
        >>> axes_motion("forward,left,up")[:2, :2].tolist()
        [[0.0, -1.0], [1.0, 0.0]]
    """
    given = axes.split(",") if isinstance(axes, str) else list(axes or ())
    result = np.zeros((4, 4))
    result[3, 3] = 1.0
    for column, word in enumerate(given[:3]):
        for row, (ahead, behind) in enumerate(_OPPOSITE.items()):
            sign = {ahead: 1.0, behind: -1.0}.get(word.strip(), 0.0)
            result[row, column] += sign
    if len(given) != 3 or abs(np.linalg.det(result)) != 1.0:
        raise InputError(
            f"axes={','.join(given)!r}: expected the directions of x, y and z, of right or left, "
            "forward or back, up or down, such as axes='forward,left,up' (KITTI, ROS)"
        )
    return None if (result == np.eye(4)).all() else result


FROM_FORWARD_X: _Matrix = np.array(
    [[0.0, -1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
)
"""From x forward, y left to nuScenes' x right, y forward."""


def inverse(motion: _Matrix) -> _Matrix:
    """The inverse of a rigid motion: (Rᵀ, −Rᵀt)."""
    result = np.eye(4)
    result[:3, :3] = motion[:3, :3].T
    result[:3, 3] = -motion[:3, :3].T @ motion[:3, 3]
    return result


def pose(rotation: Sequence[float], translation: Sequence[float]) -> _Matrix:
    """The motion of a quaternion w, x, y, z (of any length but 0) and a translation [m].

    R = I + 2w[v]× + 2[v]×² with the unit quaternion (w, v).
    """
    quaternion = np.asarray(rotation, np.float64)
    w, x, y, z = quaternion / np.linalg.norm(quaternion)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    result = np.eye(4)
    result[:3, :3] += 2 * w * cross + 2 * cross @ cross
    result[:3, 3] = translation
    return result


def move_points(points: npt.NDArray[np.float32], motion: _Matrix) -> npt.NDArray[np.float32]:
    """The same points in the other frame; columns after z stay."""
    moved = points.copy()
    moved[:, :3] = points[:, :3].astype(np.float64) @ motion[:3, :3].T + motion[:3, 3]
    return moved


def move_boxes(boxes: npt.NDArray[np.float32], motion: _Matrix) -> npt.NDArray[np.float32]:
    """The same boxes in the other frame; the yaw is that of the turned direction of the length."""
    moved = move_points(boxes, motion)
    yaw = boxes[:, 6].astype(np.float64)
    along = np.stack([np.cos(yaw), np.sin(yaw), np.zeros_like(yaw)], 1) @ motion[:3, :3].T
    moved[:, 6] = np.arctan2(along[:, 1], along[:, 0])
    return moved
