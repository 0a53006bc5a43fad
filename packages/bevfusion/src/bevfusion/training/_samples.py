"""Prepared frames become the batches that a step trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bev_data import InputError
from bev_data.voxelize import VoxelizeError
from bevfusion.model import Batch
from bevfusion.training._augment import Motion
from bevfusion.training._targets import Targets, targets_of

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion
    from bevfusion.model.head import HeadConfig
    from bevfusion.training._compact import CompactFrame

__all__ = ["make_batch", "order_of"]


def order_of(seed: int, position: int, count: int, frames: int) -> list[int]:
    """Which frames the samples from `position` on are, each epoch in an order of its own.

    Depends on nothing but its arguments, so that a run goes on where it stopped without a
    generator's state.

    Example:
        >>> order_of(0, 0, 4, 4) == order_of(0, 0, 2, 4) + order_of(0, 2, 2, 4)
        True
    """
    chosen = []
    for sample in range(position, position + count):
        epoch, place = divmod(sample, frames)
        order = np.random.default_rng((seed, 1, epoch)).permutation(frames)
        chosen.append(int(order[place]))
    return chosen


def make_batch(
    frames: Sequence[CompactFrame], motions: Sequence[Motion], model: BEVFusion
) -> tuple[Batch, list[Targets]]:
    """The frames, moved, as the model is called with them, and what its head should answer.

    Args:
        frames: At least one.
        motions: One for each.
        model: Whose voxelizer, view transform and head's sizes are used; on any device.

    Returns:
        The batch, and the targets.

    Raises:
        InputError: The model reads the LiDAR, and none of the frames has a point in its range.
    """
    parts = model.parts
    config: HeadConfig = model.head.config
    voxels = [_voxels(f, m, model, i) for i, (f, m) in enumerate(zip(frames, motions, strict=True))]
    images = depth = cells = None
    if "camera" in parts:
        images = torch.stack([frame.network_images() for frame in frames])
        depth = torch.stack([torch.from_numpy(frame.depth.astype(np.float32)) for frame in frames])
        cells = _cells(frames, motions, model)
    targets = [
        targets_of(motion.labels(frame.labels), config)
        for frame, motion in zip(frames, motions, strict=True)
    ]
    features, coords = (torch.cat(side) for side in zip(*voxels, strict=True))
    if "lidar" in parts and not len(features):
        raise InputError(
            f"{', '.join(frame.name for frame in frames)}: no point lies in the range of the "
            "model's voxels: check the units and the sensor's axes"
        )
    return Batch(features, coords, len(frames), images, depth, cells), targets


def _voxels(
    frame: CompactFrame, motion: Motion, model: BEVFusion, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = frame.points.shape[1]
    nothing = torch.zeros(0, columns), torch.zeros(0, 4, dtype=torch.int32)
    if "lidar" not in model.parts:
        return nothing
    voxelize: Any = model.lidar["voxelize"]
    try:
        features, coords, _ = voxelize(motion.points(frame.points), batch=index)
    except VoxelizeError:  # no point in range: such a frame teaches that there is nothing
        return nothing
    return features, coords


def _cells(
    frames: Sequence[CompactFrame], motions: Sequence[Motion], model: BEVFusion
) -> torch.Tensor:
    intrinsics, poses, image_aug = (
        np.stack([frame.calibration[i] for frame in frames]) for i in range(3)
    )
    moved = np.stack([motion.camera(pose) for motion, pose in zip(motions, poses, strict=True)])
    view: Any = model.camera["vtransform"]
    cells: torch.Tensor = view.cells(
        torch.from_numpy(intrinsics[..., :3, :3]),
        torch.from_numpy(moved),
        torch.from_numpy(image_aug[..., :3, :3]),
    )
    return cells
