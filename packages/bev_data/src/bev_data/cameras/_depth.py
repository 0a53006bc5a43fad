"""LiDAR points in images: where they fall, and their depth in the network's pixels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bev_data._errors import InputError
from bev_data.cameras._camera import Camera
from bev_data.cameras._prepare import CameraInputs

__all__ = ["depth_images", "project"]


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


def depth_images(
    points: Tensor | npt.NDArray[np.floating],
    inputs: CameraInputs,
    image_size: tuple[int, int] | None = None,
) -> Tensor:
    """Depth of the nearest point in every pixel of every network image.

    (u, v, 1) · z = image_aug · intrinsics · lidar_to_camera · point, with z the depth before
    `image_aug` is applied; the pixel is floor(u), floor(v). mit-bevfusion writes its points in
    order and the last one of a pixel stays, so what lies behind may overwrite what is in front
    and the result changes with the order of the points; here the nearest one stays.

    Args:
        points: [points, 3 or more], x, y, z in the LiDAR frame [m].
        inputs: what `prepare_cameras` made; on the device where the work is to be done.
        image_size: height and width of the network's images; those of `inputs.images` where None.

    Returns:
        float32 [cameras, 1, height, width], metres, 0 where no point falls.

    Raises:
        InputError: points of another shape.

    Examples:
        >>> import numpy as np
        >>> from bev_data.cameras import Camera, prepare_cameras
        >>> look_ahead = np.array([[1.0, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
        >>> matrix = np.array([[100.0, 0, 80], [0, 100, 45], [0, 0, 1]])
        >>> camera = Camera("CAM_FRONT", np.zeros((90, 160, 3), np.uint8), matrix, look_ahead)
        >>> inputs = prepare_cameras([camera], (32, 88))
        >>> depth = depth_images(np.array([[0.0, 20, 0], [0, 30, 0], [0, -5, 0]]), inputs)
        >>> depth[depth > 0].tolist()
        [20.0]
    """
    height, width = image_size if image_size is not None else inputs.images.shape[-2:]
    device = inputs.intrinsics.device
    cloud = torch.as_tensor(points, device=device)
    if cloud.ndim != 2 or cloud.shape[1] < 3:
        raise InputError(f"points must be [N, 3 or more], not {list(cloud.shape)}")
    cloud = cloud[:, :3].to(torch.float64)
    cameras = len(inputs.intrinsics)
    nearest = torch.full((cameras, height * width), torch.inf, dtype=torch.float32, device=device)
    # One matrix takes a point to (u·z, v·z, z): image_aug keeps the third component.
    to_pixels = inputs.image_aug @ inputs.intrinsics @ inputs.lidar_to_camera[:, :3]
    for camera in range(cameras):
        scaled = cloud @ to_pixels[camera, :, :3].T + to_pixels[camera, :, 3]
        scaled = scaled[scaled[:, 2] > 0]
        depth = scaled[:, 2]
        column, row = (scaled[:, :2] / depth[:, None]).floor().unbind(1)
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        pixel = (row * width + column)[inside].long()
        nearest[camera].scatter_reduce_(0, pixel, depth[inside].float(), "amin")
    return nearest.masked_fill_(nearest.isinf(), 0).view(cameras, 1, height, width)
