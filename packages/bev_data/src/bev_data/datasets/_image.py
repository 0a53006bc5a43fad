"""Pictures from files, and cameras with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from bev_data._errors import InputError
from bev_data.cameras import Camera


def read_image(path: Path, size: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
    """Pixels of a picture, uint8 [height, width, 3], RGB.

    Args:
        path: any format that Pillow knows.
        size: width and height that the calibration is for, where it says so.

    Raises:
        InputError: missing, unreadable, or of another size.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such image; the calibration names it: add it or correct that")
    try:
        with Image.open(path) as picture:
            if size is not None and picture.size != size:
                raise InputError(
                    f"{path}: the image is {picture.size[0]}x{picture.size[1]}, but its "
                    f"calibration is for {size[0]}x{size[1]}; scale fx, skew, cx by the ratio of "
                    "the widths and fy, cy by that of the heights, or use the original image"
                )
            return np.array(picture.convert("RGB"))
    except InputError:
        raise
    except (
        UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError,
        MemoryError,
    ) as error:  # fmt: skip
        raise InputError(
            f"{path}: not a readable image ({error}); it is damaged, cut off or of a format that "
            "Pillow does not know"
        ) from error


def read_camera(
    name: str,
    image: Path,
    intrinsics: npt.NDArray[np.float64],
    lidar_to_camera: npt.NDArray[np.float64],
    size: tuple[int, int] | None = None,
) -> Camera:
    """A camera whose picture is a file; the arguments are those of `Camera` and `read_image`.

    Raises:
        InputError: whatever those two refuse; the message names the file.
    """
    picture = read_image(image, size)
    try:
        return Camera(name, picture, intrinsics, lidar_to_camera)
    except InputError as error:
        raise InputError(f"{image}: {error}") from error
