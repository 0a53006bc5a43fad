"""What the model is called with, checked before a convolution complains in its own words."""

from __future__ import annotations

from torch import Tensor

from bev_data import InputError

__all__ = ["check_camera", "require"]

_STRIDE = 8  # of the feature map that is lifted


def require(branch: str, **inputs: Tensor | None) -> None:
    """Refuse a call without an input that the branch reads."""
    missing = [name for name, value in inputs.items() if value is None]
    if missing:
        raise InputError(
            f"the {branch} branch reads {', '.join(inputs)}, and {', '.join(missing)} is missing: "
            f"give the whole Batch, or build the model without its {branch.lower()} part"
        )


def check_camera(
    images: Tensor, depth: Tensor, cells: Tensor, batch_size: int, frustum: Tensor
) -> None:
    """Refuse camera inputs whose shapes do not fit each other or the frustum.

    Args:
        images: float [batch, cameras, 3, height, width].
        depth: float [batch, cameras, 1, height, width].
        cells: int64 [batch · cameras · depth bins · rows · columns].
        batch_size: Number of frames.
        frustum: The view transform's, float [depth bins, rows, columns, 3].
    """
    bins, rows, columns = frustum.shape[:3]
    height, width = rows * _STRIDE, columns * _STRIDE
    size = f"{height}, {width}"
    if images.ndim != 5 or images.shape[0] != batch_size or images.shape[1] < 1:
        raise InputError(
            f"images are {list(images.shape)}: expected [{batch_size}, cameras, 3, {size}], one "
            "entry for each frame of the batch and at least one camera"
        )
    if tuple(images.shape[2:]) != (3, height, width):
        raise InputError(
            f"images are {list(images.shape)}: this configuration takes 3 channels of "
            f"{height} × {width} pixels; prepare_cameras brings images of any size to that"
        )
    cameras = images.shape[1]
    if tuple(depth.shape) != (batch_size, cameras, 1, height, width):
        raise InputError(
            f"depth is {list(depth.shape)} for images {list(images.shape)}: expected "
            f"[{batch_size}, {cameras}, 1, {size}], one depth image for each camera image"
        )
    points = batch_size * cameras * bins * rows * columns
    if tuple(cells.shape) != (points,):
        raise InputError(
            f"cells are {list(cells.shape)}: {batch_size} frames of {cameras} cameras have "
            f"{points} frustum points; compute them with the view transform's `cells` from the "
            "same cameras"
        )
