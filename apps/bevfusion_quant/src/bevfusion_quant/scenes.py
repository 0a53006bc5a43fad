"""`bev_scenes` under the name that it had here."""

from bev_scenes import (
    RIGS,
    SIZES,
    CameraMount,
    CameraRig,
    EgoPath,
    Ground,
    Material,
    Picture,
    Scan,
    SceneObject,
    SceneSettings,
    Shape,
    Solid,
    SpinningLidar,
    Street,
    build_street,
    open_streets,
    render_street,
    scan_street,
    street_frame,
)

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

if __name__ == "__main__":
    import runpy

    runpy.run_module("bev_scenes", run_name="__main__")
