"""What the model is called with."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Batch"]


class Batch(NamedTuple):
    """Positional inputs of `BEVFusion`: voxels, and for the camera branch images with geometry.

    Attributes:
        features: float [voxels, channels]: mean x, y, z in metres, intensity, time.
        coords: int32 [voxels, 4]: batch, x, y, z in voxels.
        batch_size: Number of frames.
        images: float [batch, cameras, 3, height, width], normalised.
        depth: float [batch, cameras, 1, height, width]: metres to the LiDAR point that a pixel
            shows, 0 where it shows none.
        cells: int64 [batch · cameras · depth bins · feature height · feature width]: the cell of
            the bird's-eye view, batch included, that each frustum point lies in; −1 outside.
    """

    features: Tensor
    coords: Tensor
    batch_size: int
    images: Tensor | None = None
    depth: Tensor | None = None
    cells: Tensor | None = None
