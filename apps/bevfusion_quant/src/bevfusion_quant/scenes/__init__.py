"""Procedural scenes: a street from a seed, a LiDAR that drives through it, and six cameras."""

from __future__ import annotations

from bevfusion_quant.scenes._dataset import open_streets
from bevfusion_quant.scenes._frame import SIZES, SceneSettings, street_frame
from bevfusion_quant.scenes._ground import Ground
from bevfusion_quant.scenes._lidar import SpinningLidar
from bevfusion_quant.scenes._render import Picture, render_street
from bevfusion_quant.scenes._rig import RIGS, CameraMount, CameraRig
from bevfusion_quant.scenes._scan import Scan, scan_street
from bevfusion_quant.scenes._solids import Material, SceneObject, Shape, Solid
from bevfusion_quant.scenes._street import EgoPath, Street, build_street

__all__ = [
    "RIGS",
    "SIZES",
    "CameraMount",
    "CameraRig",
    "EgoPath",
    "Ground",
    "Material",
    "Picture",
    "Scan",
    "SceneObject",
    "SceneSettings",
    "Shape",
    "Solid",
    "SpinningLidar",
    "Street",
    "build_street",
    "open_streets",
    "render_street",
    "scan_street",
    "street_frame",
]
