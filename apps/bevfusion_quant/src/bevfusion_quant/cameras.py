"""`bev_data.cameras` under the name that it had here."""

from bev_data.cameras import (
    CAMERA_NAMES,
    IMAGE_MEAN,
    IMAGE_STD,
    Camera,
    CameraInputs,
    depth_images,
    order_cameras,
    prepare_cameras,
    project,
)

__all__ = [
    "CAMERA_NAMES",
    "IMAGE_MEAN",
    "IMAGE_STD",
    "Camera",
    "CameraInputs",
    "depth_images",
    "order_cameras",
    "prepare_cameras",
    "project",
]
