"""The smallest input that every part of the model runs on."""

from __future__ import annotations

from typing import Any

import torch

from bevfusion.model._config import BEVFusionConfig
from bevfusion.model._model import Batch


def example_batch(config: BEVFusionConfig) -> Batch:
    """A few voxels in the middle of the grid and one grey picture: enough to trace a model with.

    A frame's six cameras and all its voxels would do as well; one camera keeps the memory of
    tracing, where every activation is held, to a sixth.
    """
    lidar, camera = config.lidar, config.camera
    x, y, z = (n // 2 for n in lidar.sparse_shape)
    steps = torch.arange(8, dtype=torch.int32)
    coords = torch.stack([steps * 0, x + steps, y + steps % 3, z + steps % 2], dim=1)
    features = torch.linspace(-1, 1, 8 * lidar.in_channels).reshape(8, lidar.in_channels)
    images = torch.linspace(-1, 1, 3 * camera.image_size[0] * camera.image_size[1])
    images = images.reshape(1, 1, 3, *camera.image_size)
    depth = images[:, :, :1].abs() * camera.dbound[1]
    rows, columns = camera.feature_size
    points = len(torch.arange(*camera.dbound)) * rows * columns
    (low, high, step), (first, last, width) = camera.xbound, camera.ybound
    cells = round((high - low) / step) * round((last - first) / width)
    # A stride prime to the number of cells spreads the points over all of them.
    spread = torch.arange(points) * 7919 % cells
    return Batch(features, coords.contiguous(), 1, images, depth, spread)


def example_like(config: BEVFusionConfig, batch: Batch) -> Batch:
    """`example_batch`, of the sensors that a batch has."""
    absent: dict[str, Any] = {
        name: None for name, given in batch._asdict().items() if given is None
    }
    return example_batch(config)._replace(**absent)
