"""Prepared frames, rotated, mirrored and scaled, as the batches of training steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from bev_data import InputError
from bev_data.points import Labels
from bev_data.voxelize import VoxelizeError
from bevfusion.model import Batch
from bevfusion.training._targets import Targets, targets_of

if TYPE_CHECKING:
    from bevfusion.model import Detector
    from bevfusion.training._compact import CompactFrame


@dataclass(frozen=True)
class Motion:
    """p' = s · M · R(θ) · p: turned about z, mirrored, scaled; z is scaled alone.

    Attributes:
        angle: θ [rad], counter-clockwise.
        mirror: M's factors of x and y, each 1 or −1.
        scale: s.
    """

    angle: float = 0.0
    mirror: tuple[int, int] = (1, 1)
    scale: float = 1.0

    @property
    def matrix(self) -> npt.NDArray[np.float64]:
        """The motion as float64 [4, 4]."""
        c, s = math.cos(self.angle), math.sin(self.angle)
        x, y = (self.scale * side for side in self.mirror)
        matrix = np.diag([1.0, 1.0, self.scale, 1.0])
        matrix[:2, :2] = [[x * c, -x * s], [y * s, y * c]]
        return matrix

    def points(self, points: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Points [n, 3 or more] with x, y, z moved and other columns unchanged."""
        moved = points.copy()
        moved[:, :3] = points[:, :3] @ self.matrix[:3, :3].T.astype(np.float32)
        return moved

    def labels(self, labels: Labels) -> Labels:
        """Boxes moved, sizes and velocities scaled; the yaw follows the box's direction."""
        boxes, matrix = labels.boxes.copy(), self.matrix
        boxes[:, :3] = labels.boxes[:, :3] @ matrix[:3, :3].T
        boxes[:, 3:6] *= self.scale
        yaw = labels.boxes[:, 6] + self.angle
        boxes[:, 6] = np.arctan2(self.mirror[1] * np.sin(yaw), self.mirror[0] * np.cos(yaw))
        velocities = labels.velocities
        if velocities is not None:
            velocities = (velocities @ matrix[:2, :2].T).astype(np.float32)
        return labels._replace(boxes=boxes, velocities=velocities)

    def camera(self, lidar_to_camera: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Matrices [..., 4, 4] that map moved points to the cameras' original coordinates.

        Pictures and their depth are not changed: lidar_to_camera · T⁻¹ · (T p) is the original
        position of p. The camera branch thus fills the moved map, and cameras need no augmentation
        of their own.
        """
        moved: npt.NDArray[np.float64] = lidar_to_camera @ np.linalg.inv(self.matrix)
        return moved


@dataclass(frozen=True)
class Augmentation:
    """Distribution of random motions; mit-bevfusion's GlobalRotScaleTrans and RandomFlip3D.

    Args:
        flip: Mirror x and y, each in half of the draws.
        rotation: The angle is uniform in ± this [rad]; mit-bevfusion's is π/4.
        scale: The factor is uniform in 1 ± this; mit-bevfusion's is 0.1.

    Raises:
        InputError: A negative rotation, or a scale outside 0 to 0.9.

    Example:
        >>> import numpy as np
        >>> motion = Augmentation().draw(np.random.default_rng(0))
        >>> motion.matrix.shape, abs(motion.angle) < 0.2
        ((4, 4), True)
    """

    flip: bool = True
    rotation: float = 0.2
    scale: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.rotation < math.inf:
            raise InputError(f"--rotation {self.rotation}: it must be an angle from 0 up [rad]")
        if not 0 <= self.scale <= 0.9:
            raise InputError(f"--scale {self.scale}: it must be from 0 to 0.9")

    def draw(self, generator: np.random.Generator) -> Motion:
        """One motion; the generator advances by the same amount for all settings."""
        angle, scale = generator.uniform(-1, 1, 2)
        x, y = generator.integers(0, 2, 2)
        mirror = (1 - 2 * int(x), 1 - 2 * int(y)) if self.flip else (1, 1)
        return Motion(float(angle) * self.rotation, mirror, 1 + float(scale) * self.scale)


def order_of(seed: int, position: int, count: int, frames: int) -> list[int]:
    """Indices of the frames of the samples from `position` on; each epoch has its own order.

    It depends on its arguments alone, so a run can be resumed without a generator's state.

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
    frames: Sequence[CompactFrame], motions: Sequence[Motion], model: Detector
) -> tuple[Batch, list[Targets]]:
    """The moved frames as the model's arguments, and the targets of its head.

    Args:
        frames: At least one.
        motions: One for each.
        model: Provides voxelizer, view transform and the head's sizes; on any device.

    Returns:
        The batch, and the targets.

    Raises:
        InputError: The model reads the LiDAR, and none of the frames has a point in its range.
    """
    parts = model.parts
    config = model.head.config
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
    filled = [found for found in voxels if found is not None]
    if "lidar" in parts and not filled:
        raise InputError(
            f"{', '.join(frame.name for frame in frames)}: no point lies in the range of the "
            "model's voxels: check the units and the sensor's axes"
        )
    nothing = torch.zeros(0, frames[0].points.shape[1]), torch.zeros(0, 4, dtype=torch.int32)
    features, coords = (torch.cat(side) for side in zip(*(filled or [nothing]), strict=True))
    return Batch(features, coords, len(frames), images, depth, cells), targets


def _voxels(
    frame: CompactFrame, motion: Motion, model: Detector, index: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if "lidar" not in model.parts:
        return None
    voxelize: Any = model.lidar["voxelize"]
    try:
        features, coords, _ = voxelize(motion.points(frame.points), batch=index)
    except VoxelizeError:  # no point in range: such a frame teaches that there is nothing
        return None
    return features, coords


def _cells(
    frames: Sequence[CompactFrame], motions: Sequence[Motion], model: Detector
) -> torch.Tensor:
    intrinsics, poses, image_aug = (
        np.stack([frame.calibration[i] for frame in frames]) for i in range(3)
    )
    moved = np.stack([motion.camera(pose) for motion, pose in zip(motions, poses, strict=True)])
    built: Any = model
    view = built.camera["vtransform"]
    cells: torch.Tensor = view.cells(
        torch.from_numpy(intrinsics[..., :3, :3]),
        torch.from_numpy(moved),
        torch.from_numpy(image_aug[..., :3, :3]),
    )
    return cells
