"""Calibrated pictures: what a camera is, where points fall in it, and the network's input."""

from __future__ import annotations

from bevfusion_quant.cameras._camera import CAMERA_NAMES, Camera
from bevfusion_quant.cameras._depth import depth_images
from bevfusion_quant.cameras._prepare import CameraInputs, order_cameras, prepare_cameras
from bevfusion_quant.cameras._project import project

__all__ = [
    "CAMERA_NAMES",
    "Camera",
    "CameraInputs",
    "depth_images",
    "order_cameras",
    "prepare_cameras",
    "project",
]
