"""Calibrated pictures: cameras, projection of points, and the network's input."""

from __future__ import annotations

from bev_data.cameras._camera import (
    CAMERA_NAMES,
    IMAGE_MEAN,
    IMAGE_STD,
    Camera,
    CameraInputs,
    depth_images,
    order_cameras,
    prepare_cameras,
    project,
    wire_frame,
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
    "wire_frame",
]
