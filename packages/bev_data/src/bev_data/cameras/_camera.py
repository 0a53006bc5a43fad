"""One calibrated picture, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError

CAMERA_NAMES = (
    "CAM_FRONT",
    "CAM_FRONT_RIGHT",
    "CAM_FRONT_LEFT",
    "CAM_BACK",
    "CAM_BACK_LEFT",
    "CAM_BACK_RIGHT",
)
_FOCAL_IN_IMAGES = (0.03, 50.0)  # of the longer side: 173 degrees to 1.1 degrees across
_RIGID = 1e-3


@dataclass(frozen=True, eq=False)
class Camera:
    """A picture with its calibration: pinhole, without lens distortion.

    A point p of the LiDAR frame (x right, y forward, z up) is at `lidar_to_camera` · p in the
    camera's frame (x right, y down, z forward), and `intrinsics` · that, divided by its third
    component, is its pixel (u right, v down; the first pixel covers 0 to 1).

    Args:
        name: nuScenes' name of the direction, such as "CAM_FRONT" (see `CAMERA_NAMES`).
        image: uint8 [height, width, 3], RGB.
        intrinsics: float64 [3, 3], pixels of this very image.
        lidar_to_camera: float64 [4, 4], rigid, metres.

    Raises:
        InputError: another shape or type; intrinsics that are singular, or of another unit or
            image size (a focal length under 0.03 or over 50 times the image's longer side, a
            principal point outside the image); an extrinsic that is not a rigid motion.

    Examples:
        >>> import numpy as np
        >>> matrix = np.array([[100.0, 0, 80], [0, 100, 45], [0, 0, 1]])
        >>> image = np.zeros((90, 160, 3), np.uint8)
        >>> camera = Camera("CAM_FRONT", image, matrix, np.eye(4))
        >>> camera.width, camera.height
        (160, 90)
    """

    name: str
    image: npt.NDArray[np.uint8]
    intrinsics: npt.NDArray[np.float64]
    lidar_to_camera: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        image = self.image
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
            raise InputError(
                f"{self.name}: image must be uint8 [height, width, 3], RGB, "
                f"not {image.dtype} {list(image.shape)}"
            )
        _check_matrix(self.name, "intrinsics", self.intrinsics, 3)
        _check_matrix(self.name, "lidar_to_camera", self.lidar_to_camera, 4)
        _check_intrinsics(self.name, self.intrinsics, self.width, self.height)
        _check_rigid(self.name, self.lidar_to_camera)

    @property
    def height(self) -> int:
        """Rows of the image [pixels]."""
        return int(self.image.shape[0])

    @property
    def width(self) -> int:
        """Columns of the image [pixels]."""
        return int(self.image.shape[1])


def _check_matrix(name: str, what: str, matrix: npt.NDArray[np.float64], size: int) -> None:
    if matrix.shape != (size, size) or matrix.dtype != np.float64:
        raise InputError(
            f"{name}: {what} must be float64 [{size}, {size}], "
            f"not {matrix.dtype} {list(matrix.shape)}"
        )
    if not np.isfinite(matrix).all():
        raise InputError(f"{name}: {what} holds NaN or Inf; the calibration is missing or damaged")


def _check_intrinsics(name: str, matrix: npt.NDArray[np.float64], width: int, height: int) -> None:
    if np.linalg.det(matrix) == 0:
        raise InputError(
            f"{name}: the intrinsics are singular: {matrix.tolist()}; the calibration is missing "
            "or was never filled in"
        )
    if not np.allclose(matrix[2], [0, 0, 1]) or matrix[1, 0] != 0:
        raise InputError(
            f"{name}: intrinsics must be [[fx, skew, cx], [0, fy, cy], [0, 0, 1]], "
            f"not {matrix.tolist()}"
        )
    fx, fy, (cx, cy) = matrix[0, 0], matrix[1, 1], matrix[:2, 2]
    longer = max(width, height)
    low, high = (share * longer for share in _FOCAL_IN_IMAGES)
    if not (low <= fx <= high and low <= fy <= high):
        raise InputError(
            f"{name}: focal lengths fx {fx:g} and fy {fy:g} do not fit an image of "
            f"{width}x{height}: expected {low:g} to {high:g} pixels; intrinsics are in pixels, so "
            "multiply normalised ones by the image's width and height, and divide metres or "
            "millimetres by the size of a pixel"
        )
    if not (0 <= cx <= width and 0 <= cy <= height):
        raise InputError(
            f"{name}: the principal point ({cx:g}, {cy:g}) lies outside the image of "
            f"{width}x{height}; the intrinsics belong to another image size: scale them with the "
            "image"
        )


def _check_rigid(name: str, matrix: npt.NDArray[np.float64]) -> None:
    if not np.allclose(matrix[3], [0, 0, 0, 1], atol=1e-9):
        raise InputError(
            f"{name}: the last row of lidar_to_camera must be 0, 0, 0, 1, not "
            f"{matrix[3].tolist()}; it may be transposed"
        )
    turn = matrix[:3, :3]
    if np.abs(turn @ turn.T - np.eye(3)).max() > _RIGID:
        raise InputError(
            f"{name}: lidar_to_camera is not rigid: its upper left 3x3 is no rotation "
            f"(determinant {np.linalg.det(turn):.4g}); leave scale and intrinsics out of it"
        )
    if np.linalg.det(turn) < 0:
        raise InputError(
            f"{name}: lidar_to_camera mirrors (determinant -1): an axis has the wrong sign; the "
            "LiDAR frame is x right, y forward, z up, the camera's x right, y down, z forward"
        )
