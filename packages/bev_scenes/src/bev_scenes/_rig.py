"""Where cameras are mounted on the car, which way they look and how wide."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bev_scenes._solids import unit


@dataclass(frozen=True)
class CameraMount:
    """One camera on the car: a pinhole without lens distortion, upright.

    Args:
        name: nuScenes' name of its direction, such as "CAM_FRONT".
        position: x, y, z in the LiDAR's frame (x right, y forward, z up) [m].
        yaw: from straight ahead, counter-clockwise from above [degrees].
        pitch: upwards from the horizon [degrees].
        fov: horizontal field of view [degrees].
        width: of the image [pixels].
        height: of the image [pixels].

    Raises:
        ValueError: no image, or a field of view outside 1 to 170 degrees.

    Examples:
        >>> mount = CameraMount("CAM_FRONT", (0.0, 0.76, -0.33), 0.0, 0.0, 90.0, 320, 180)
        >>> mount.intrinsics.tolist()
        [[160.0, 0.0, 160.0], [0.0, 160.0, 90.0], [0.0, 0.0, 1.0]]
    """

    name: str
    position: tuple[float, float, float]
    yaw: float
    pitch: float
    fov: float
    width: int
    height: int

    def __post_init__(self) -> None:
        if self.width < 1 or self.height < 1:
            raise ValueError(f"{self.name}: an image of {self.width}x{self.height} has no pixels")
        if not 1.0 <= self.fov <= 170.0:
            raise ValueError(f"{self.name}: fov={self.fov}: expected 1 to 170 degrees")
        if not abs(self.pitch) < 90.0:
            raise ValueError(f"{self.name}: pitch={self.pitch}: expected -90 < pitch < 90 degrees")

    @property
    def intrinsics(self) -> npt.NDArray[np.float64]:
        """float64 [3, 3] [pixels]: square pixels, f = width / (2 tan(fov / 2)), centred."""
        focal = round(self.width / (2.0 * math.tan(math.radians(self.fov) / 2.0)), 9)
        return np.array(
            [[focal, 0.0, self.width / 2], [0.0, focal, self.height / 2], [0.0, 0.0, 1.0]]
        )

    @property
    def axes(self) -> npt.NDArray[np.float64]:
        """float64 [3, 3]: the camera's right, down and forward as rows, in the LiDAR's frame."""
        (c, s), (up, out) = unit(math.radians(self.yaw)), unit(math.radians(self.pitch))
        forward = np.array([-s * up, c * up, out])
        right = np.array([c, s, 0.0])
        down = np.array([-s * out, c * out, -up])
        return np.stack([right, down, forward])

    @property
    def lidar_to_camera(self) -> npt.NDArray[np.float64]:
        """float64 [4, 4]: moves points of the LiDAR's frame into the camera's."""
        matrix = np.eye(4)
        matrix[:3, :3] = self.axes
        matrix[:3, 3] = -self.axes @ np.array(self.position)
        return matrix


@dataclass(frozen=True)
class CameraRig:
    """All cameras of a car.

    Args:
        cameras: in the order in which frames hold them.

    Raises:
        ValueError: no camera, or two of one name.
    """

    cameras: tuple[CameraMount, ...]

    def __post_init__(self) -> None:
        names = [mount.name for mount in self.cameras]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"cameras {names}: expected at least one, and each name once")

    def resized(self, width: int, height: int) -> CameraRig:
        """The same views at another size of the images [pixels].

        The field of view is the horizontal one, so another shape cuts off or adds rows.
        """
        return CameraRig(
            tuple(replace(mount, width=width, height=height) for mount in self.cameras)
        )


def _nuscenes() -> CameraRig:
    # Mounting as published for nuScenes' car, to the centimetre and the degree. The fields of
    # view are those of its calibrated focal lengths, 1266 and 809 pixels at 1600 pixels' width.
    narrow, wide = 64.57, 89.36
    places = (
        ("CAM_FRONT", (0.0, 0.76, -0.33), 0.0, narrow),
        ("CAM_FRONT_RIGHT", (0.49, 0.61, -0.34), -56.0, narrow),
        ("CAM_FRONT_LEFT", (-0.49, 0.58, -0.33), 55.0, narrow),
        ("CAM_BACK", (0.0, -0.92, -0.26), 180.0, wide),
        ("CAM_BACK_LEFT", (-0.48, 0.09, -0.25), 109.0, narrow),
        ("CAM_BACK_RIGHT", (0.48, 0.07, -0.28), -110.0, narrow),
    )
    return CameraRig(
        tuple(CameraMount(name, at, yaw, 0.0, fov, 1600, 900) for name, at, yaw, fov in places)
    )


RIGS: dict[str, CameraRig] = {
    "nuscenes": _nuscenes(),
    "tiny": _nuscenes().resized(320, 180),
}
