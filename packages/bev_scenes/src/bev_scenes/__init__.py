"""Procedural scenes: a street from a seed, a LiDAR that drives through it, and six cameras.

With this package installed `bev_data.datasets.open_dataset("street", …)` opens streets.
"""

from __future__ import annotations

from bev_scenes._conditions import CONDITIONS, Conditions
from bev_scenes._frame import SIZES, SceneSettings, open_streets, stored_street, street_frame
from bev_scenes._ground import Ground
from bev_scenes._labels import scanner_pose
from bev_scenes._render import Picture, render_street
from bev_scenes._rig import RIGS, CameraMount, CameraRig
from bev_scenes._scan import Scan, SpinningLidar, scan_street
from bev_scenes._solids import Material, SceneObject, Shape, Solid
from bev_scenes._street import EgoPath, Street, build_street

__version__ = "0.2.0"
__all__ = [
    "CONDITIONS",
    "RIGS",
    "SIZES",
    "CameraMount",
    "CameraRig",
    "Conditions",
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
    "scanner_pose",
    "stored_street",
    "street_frame",
]
