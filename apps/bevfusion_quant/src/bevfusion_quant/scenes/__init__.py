"""Procedural scenes: a street from a seed, and a ray-cast spinning LiDAR that drives through it."""

from __future__ import annotations

from bevfusion_quant.scenes._frame import street_frame
from bevfusion_quant.scenes._ground import Ground
from bevfusion_quant.scenes._lidar import SpinningLidar
from bevfusion_quant.scenes._scan import Scan, scan_street
from bevfusion_quant.scenes._solids import Material, SceneObject, Shape, Solid
from bevfusion_quant.scenes._street import EgoPath, Street, build_street

__all__ = [
    "EgoPath",
    "Ground",
    "Material",
    "Scan",
    "SceneObject",
    "Shape",
    "Solid",
    "SpinningLidar",
    "Street",
    "build_street",
    "scan_street",
    "street_frame",
]
