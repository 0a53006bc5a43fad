"""Calibrated pictures, checked when made, and the inputs of the camera branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from bev_data._errors import InputError
from bev_data.boxes import BOX_EDGES

CAMERA_NAMES = (
    "CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_FRONT_LEFT", "CAM_BACK", "CAM_BACK_LEFT", "CAM_BACK_RIGHT",
)  # fmt: skip
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


# Inputs of the camera branch from pictures and points: normalised images and depth.

IMAGE_MEAN = np.array([0.485, 0.456, 0.406], np.float32)  # of ImageNet, RGB in 0..1
IMAGE_STD = np.array([0.229, 0.224, 0.225], np.float32)


class CameraInputs(NamedTuple):
    """Inputs of the camera branch, one entry per camera.

    Attributes:
        images: float32 [cameras, 3, height, width], (RGB / 255 − mean) / std of ImageNet.
        intrinsics: float64 [cameras, 3, 3], of the original images [pixels].
        lidar_to_camera: float64 [cameras, 4, 4] [m].
        image_aug: float64 [cameras, 3, 3], maps a pixel (u, v, 1) of the original image to the
            network's.
    """

    images: Tensor
    intrinsics: Tensor
    lidar_to_camera: Tensor
    image_aug: Tensor


def order_cameras(
    cameras: Sequence[Camera], names: Sequence[str] = CAMERA_NAMES
) -> tuple[Camera, ...]:
    """The cameras of these names, in this order.

    Args:
        cameras: a frame's, in any order.
        names: those that the model wants, `CAMERA_NAMES` for mit-bevfusion's.

    Raises:
        InputError: one of them is missing.

    Examples:
        >>> import numpy as np
        >>> matrix = np.array([[50.0, 0, 32], [0, 50, 18], [0, 0, 1]])
        >>> image = np.zeros((36, 64, 3), np.uint8)
        >>> cameras = [Camera(name, image, matrix, np.eye(4)) for name in ("CAM_BACK", "CAM_FRONT")]
        >>> [camera.name for camera in order_cameras(cameras, ("CAM_FRONT", "CAM_BACK"))]
        ['CAM_FRONT', 'CAM_BACK']
    """
    found = {camera.name: camera for camera in cameras}
    missing = [name for name in names if name not in found]
    if missing:
        raise InputError(
            f"no camera {', '.join(missing)}; the frame has {', '.join(found) or 'no cameras'}: "
            "add the image and its calibration, or choose a model for fewer cameras"
        )
    return tuple(found[name] for name in names)


def prepare_cameras(
    cameras: Sequence[Camera], image_size: tuple[int, int] = (256, 704)
) -> CameraInputs:
    """Resize, crop and normalise pictures as mit-bevfusion does at test time (`ImageAug3D`).

    The image is scaled, with its proportions kept, to 768/704 of the network's width (a factor 0.48
    for 1600x900 → 256x704), then cropped: the excess width in equal parts from left and right, the
    excess height from the top, where the sky is. If the scaled image is too low, black rows are
    added at the top. Scaling is Pillow's bicubic one.

    Args:
        cameras: at least one; sizes may differ.
        image_size: height and width of the network's images.

    Raises:
        InputError: no cameras, or an impossible size.
    """
    if not cameras:
        raise InputError("no cameras: the camera branch needs at least one image with calibration")
    height, width = image_size
    if height < 1 or width < 1:
        raise InputError(f"image_size {image_size}: height and width must be positive")
    cut = [_cut(camera.image, height, width) for camera in cameras]
    stacked = np.stack([picture for picture, _ in cut]).astype(np.float32)
    stacked /= 255
    stacked -= IMAGE_MEAN
    stacked /= IMAGE_STD
    return CameraInputs(
        torch.from_numpy(np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))),
        torch.from_numpy(np.stack([camera.intrinsics for camera in cameras])),
        torch.from_numpy(np.stack([camera.lidar_to_camera for camera in cameras])),
        torch.from_numpy(np.stack([mapping for _, mapping in cut])),
    )


def _cut(
    image: npt.NDArray[np.uint8], height: int, width: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """The picture at the network's size, and the map of its pixels."""
    old_height, old_width = image.shape[:2]
    new_width = round(width * 768 / 704)
    new_height = max(round(old_height * new_width / old_width), 1)
    left, top = (new_width - width) // 2, new_height - height
    picture = Image.fromarray(image)
    if (new_width, new_height) != picture.size:
        picture = picture.resize((new_width, new_height), Image.Resampling.BICUBIC)
    picture = picture.crop((left, top, left + width, top + height))  # black where it is outside
    # Pillow scales edge to edge, so each axis has the ratio of its own rounded size.
    mapping = np.array(
        [[new_width / old_width, 0, -left], [0, new_height / old_height, -top], [0, 0, 1]]
    )
    return np.asarray(picture), mapping


def project(
    camera: Camera, points: npt.NDArray[np.floating]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Pixels and depths of points: (u, v, 1) · depth = intrinsics · lidar_to_camera · point.

    Args:
        camera: the picture.
        points: [N, 3 or more], x, y, z in the LiDAR frame [m]; further columns are not read.

    Returns:
        Pixels float64 [N, 2] (u right, v down, inside the image or not; NaN where the point is not
        in front of the camera), and depth float64 [N], the distance along the optical axis [m].

    Raises:
        InputError: points of another shape.

    Examples:
        >>> import numpy as np
        >>> look_ahead = np.array([[1.0, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
        >>> matrix = np.array([[100.0, 0, 80], [0, 100, 45], [0, 0, 1]])
        >>> camera = Camera("CAM_FRONT", np.zeros((90, 160, 3), np.uint8), matrix, look_ahead)
        >>> pixels, depth = project(camera, np.array([[2.0, 10, 0], [0, -10, 0]]))
        >>> pixels[0].tolist(), depth.tolist()
        ([100.0, 45.0], [10.0, -10.0])
    """
    if points.ndim != 2 or points.shape[1] < 3:
        raise InputError(f"points must be [N, 3 or more], not {list(points.shape)}")
    turn, shift = camera.lidar_to_camera[:3, :3], camera.lidar_to_camera[:3, 3]
    seen = points[:, :3].astype(np.float64) @ turn.T + shift
    depth = seen[:, 2].copy()
    pixels = np.full((len(points), 2), np.nan)
    front = depth > 0
    scaled = seen[front] @ camera.intrinsics.T
    pixels[front] = scaled[:, :2] / scaled[:, 2:]
    return pixels, depth


def depth_images(
    points: Tensor | npt.NDArray[np.floating],
    inputs: CameraInputs,
    image_size: tuple[int, int] | None = None,
) -> Tensor:
    """Depth of the nearest point in every pixel of every network image.

    (u, v, 1) · z = image_aug · intrinsics · lidar_to_camera · point, with z the depth before
    `image_aug` is applied; the pixel is floor(u), floor(v). In mit-bevfusion the last point of a
    pixel stays, so a hidden point may overwrite a visible one and the result depends on the order
    of the points. Here the nearest point stays.

    Args:
        points: [points, 3 or more], x, y, z in the LiDAR frame [m].
        inputs: result of `prepare_cameras`, on the device of the computation.
        image_size: height and width of the network's images; None for those of `inputs.images`.

    Returns:
        float32 [cameras, 1, height, width], metres, 0 where no point falls.

    Raises:
        InputError: points of another shape.
    """
    height, width = image_size if image_size is not None else inputs.images.shape[-2:]
    device = inputs.intrinsics.device
    cloud = torch.as_tensor(points, device=device)
    if cloud.ndim != 2 or cloud.shape[1] < 3:
        raise InputError(f"points must be [N, 3 or more], not {list(cloud.shape)}")
    cloud = cloud[:, :3].to(torch.float64)
    cameras = len(inputs.intrinsics)
    nearest = torch.full((cameras, height * width), torch.inf, dtype=torch.float32, device=device)
    # One matrix takes a point to (u·z, v·z, z): image_aug keeps the third component.
    to_pixels = inputs.image_aug @ inputs.intrinsics @ inputs.lidar_to_camera[:, :3]
    for camera in range(cameras):
        scaled = cloud @ to_pixels[camera, :, :3].T + to_pixels[camera, :, 3]
        scaled = scaled[scaled[:, 2] > 0]
        depth = scaled[:, 2]
        column, row = (scaled[:, :2] / depth[:, None]).floor().unbind(1)
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        pixel = (row * width + column)[inside].long()
        nearest[camera].scatter_reduce_(0, pixel, depth[inside].float(), "amin")
    return nearest.masked_fill_(nearest.isinf(), 0).view(cameras, 1, height, width)


_NEAR = 0.3  # metres before the lens where lines are cut


def wire_frame(corners: npt.NDArray[np.floating], camera: Camera) -> npt.NDArray[np.floating]:
    """The edges of a box in a picture.

    Edges are cut at a plane just in front of the lens, so parts behind the camera are not mirrored
    into the picture.

    Args:
        corners: [8, 3] in the LiDAR frame [m], of `boxes.box_corners`.
        camera: The picture.

    Returns:
        [lines, 2, 2]: u, v of both ends in pixels; empty if no line touches the picture.
    """
    seen = corners @ camera.lidar_to_camera[:3, :3].T + camera.lidar_to_camera[:3, 3]
    height, width = camera.image.shape[:2]
    lines, touches = [], False
    for a, b in BOX_EDGES:
        cut = _in_front(seen[a], seen[b])
        if cut is None:
            continue
        pixels = cut @ camera.intrinsics.T
        line = pixels[:, :2] / pixels[:, 2:]
        low, high = line.min(0), line.max(0)
        touches |= bool((high > 0).all() and low[0] < width and low[1] < height)
        lines.append(line)
    return np.array(lines) if touches else np.zeros((0, 2, 2))


_Ends = npt.NDArray[np.floating]


def _in_front(a: _Ends, b: _Ends) -> _Ends | None:
    if a[2] < _NEAR and b[2] < _NEAR:
        return None
    if a[2] < _NEAR or b[2] < _NEAR:
        middle = a + (b - a) * ((_NEAR - a[2]) / (b[2] - a[2]))
        a, b = (middle, b) if a[2] < _NEAR else (a, middle)
    return np.stack([a, b])
