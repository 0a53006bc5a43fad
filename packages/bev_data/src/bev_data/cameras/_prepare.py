"""From pictures to what the camera branch takes: one size, normalised, with the exact mapping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from bev_data._errors import InputError
from bev_data.cameras._camera import CAMERA_NAMES, Camera

__all__ = ["IMAGE_MEAN", "IMAGE_STD", "CameraInputs", "order_cameras", "prepare_cameras"]

IMAGE_MEAN = np.array([0.485, 0.456, 0.406], np.float32)  # of ImageNet, RGB in 0..1
IMAGE_STD = np.array([0.229, 0.224, 0.225], np.float32)


class CameraInputs(NamedTuple):
    """What the camera branch takes, one entry for each camera.

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

    The image is scaled, with its proportions kept, to 768/704 of the network's width (a factor
    0.48 for 1600x900 → 256x704), then cut: half of what is over from the left and from the right,
    all that is over from the top, where the sky is. Where the scaled image is too low, black rows
    are added at the top. Scaling is Pillow's bicubic one.

    Args:
        cameras: at least one; sizes may differ.
        image_size: height and width that the network takes.

    Raises:
        InputError: no cameras, or an impossible size.

    Examples:
        >>> import numpy as np
        >>> matrix = np.array([[1266.0, 0, 816], [0, 1266, 491], [0, 0, 1]])
        >>> image = np.zeros((900, 1600, 3), np.uint8)
        >>> inputs = prepare_cameras([Camera("CAM_FRONT", image, matrix, np.eye(4))])
        >>> inputs.images.shape, inputs.image_aug[0, :2].tolist()
        (torch.Size([1, 3, 256, 704]), [[0.48, 0.0, -32.0], [0.0, 0.48, -176.0]])
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
