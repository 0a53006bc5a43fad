"""Small batches for tests of the whole model: random voxels and images, cameras all around."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bevfusion.model import Batch, BEVFusion, BEVFusionConfig

__all__ = ["model_batch"]


def model_batch(
    model: BEVFusion,
    config: BEVFusionConfig,
    *,
    frames: int = 1,
    cameras: int = 1,
    voxels: int = 400,
    seed: int = 0,
) -> Batch:
    """A batch that every part of `model` can read; voxels are sorted by frame."""
    generator = torch.Generator().manual_seed(seed)
    x, y, z = config.lidar.sparse_shape
    keys = torch.randint(frames * x * y * z, (2 * voxels,), generator=generator).unique()
    keys = keys[torch.randperm(len(keys), generator=generator)[:voxels]].sort().values
    columns = []
    for extent in (z, y, x):
        columns.append(keys % extent)
        keys = keys // extent
    coords = torch.stack([keys, *columns[::-1]], 1).int()
    features = torch.randn(voxels, config.lidar.in_channels, generator=generator)
    if "camera" not in model.parts:
        return Batch(features, coords, frames)
    height, width = config.camera.image_size
    images = torch.randn(frames, cameras, 3, height, width, generator=generator)
    shown = torch.rand(frames, cameras, 1, height, width, generator=generator) < 0.05
    depth = torch.rand(shown.shape, generator=generator) * 58 + 1
    cells = model.camera["vtransform"].cells(*_geometry(frames, cameras, height, width))
    return Batch(features, coords, frames, images, depth * shown, cells)


def _geometry(frames: int, cameras: int, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cameras at the LiDAR's place, turned evenly; 80° wide; images as they are."""
    focal = 0.6 * width
    intrinsics = torch.tensor([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1]])
    poses = []
    for index in range(cameras):
        angle = 2 * math.pi * index / cameras
        sine, cosine = math.sin(angle), math.cos(angle)
        pose = torch.eye(4)
        pose[:3, :3] = torch.tensor([[cosine, -sine, 0], [0, 0, -1], [sine, cosine, 0]])
        poses.append(pose)
    each = (frames, cameras)
    return (
        intrinsics.double().expand(*each, 3, 3),
        torch.stack(poses).double().expand(*each, 4, 4),
        torch.eye(3, dtype=torch.float64).expand(*each, 3, 3),
    )
