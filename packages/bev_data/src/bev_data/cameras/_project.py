"""Where points of the LiDAR frame fall in a picture."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError
from bev_data.cameras._camera import Camera

__all__ = ["project"]


def project(
    camera: Camera, points: npt.NDArray[np.floating]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Pixels and depths of points: (u, v, 1) · depth = intrinsics · lidar_to_camera · point.

    Args:
        camera: the picture.
        points: [N, 3 or more], x, y, z in the LiDAR frame [m]; further columns are not read.

    Returns:
        Pixels float64 [N, 2] (u right, v down, inside the image or not; NaN where the point is not
        in front of the camera), and depth float64 [N], the distance along the optical axis [m].

    Raises:
        InputError: points of another shape.

    Examples:
        >>> import numpy as np
        >>> look_ahead = np.array([[1.0, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
        >>> matrix = np.array([[100.0, 0, 80], [0, 100, 45], [0, 0, 1]])
        >>> camera = Camera("CAM_FRONT", np.zeros((90, 160, 3), np.uint8), matrix, look_ahead)
        >>> pixels, depth = project(camera, np.array([[2.0, 10, 0], [0, -10, 0]]))
        >>> pixels[0].tolist(), depth.tolist()
        ([100.0, 45.0], [10.0, -10.0])
    """
    if points.ndim != 2 or points.shape[1] < 3:
        raise InputError(f"points must be [N, 3 or more], not {list(points.shape)}")
    turn, shift = camera.lidar_to_camera[:3, :3], camera.lidar_to_camera[:3, 3]
    seen = points[:, :3].astype(np.float64) @ turn.T + shift
    depth = seen[:, 2].copy()
    pixels = np.full((len(points), 2), np.nan)
    front = depth > 0
    scaled = seen[front] @ camera.intrinsics.T
    pixels[front] = scaled[:, :2] / scaled[:, 2:]
    return pixels, depth
