"""Calibrated pictures: what a camera is, where points fall in it, and the network's input."""

from __future__ import annotations

from bevfusion_quant.cameras._camera import CAMERA_NAMES, Camera

__all__ = ["CAMERA_NAMES", "Camera"]
