"""Batches of training steps: prepared frames moved at random, labels in the head's own units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bev_data import InputError
from bev_data.points import Labels
from bev_data.voxelize import VoxelizeError
from bevfusion.model import Batch

if TYPE_CHECKING:
    from bevfusion.model import Detector
    from bevfusion.model.head import HeadConfig, MapSizes
    from bevfusion.training._prepare import CompactFrame

Floats = npt.NDArray[np.float32]
_MIN_OVERLAP = 0.1
_SMALLEST_RADIUS = 1.2  # m: two of mit-bevfusion's 0.6 m cells


class Targets(NamedTuple):
    """Labelled objects of one frame that the head can find.

    Attributes:
        boxes: float32 [objects, 7], as in `points.Labels`.
        velocities: float32 [objects, 2] [m/s]; NaN where not known.
        classes: int64 [objects], numbers of `HeadConfig.classes`.
    """

    boxes: Floats
    velocities: Floats
    classes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.boxes)


def targets_of(labels: Labels, config: MapSizes) -> Targets:
    """Labels of the head's classes with their centre on the map and at least one LiDAR point.

    nuScenes' evaluation leaves out boxes without points too. Labels without counted points all
    stay.

    Args:
        labels: Labels of one frame, after augmentation.
        config: Configuration of the head.
    """
    known = np.array([name in config.classes for name in labels.names], bool)
    cells = _cells(labels.boxes[:, :2], config)
    inside = ((cells >= 0) & (cells < config.map_size)).all(1)
    kept = known & inside
    if labels.num_points is not None:
        kept &= labels.num_points > 0
    rows = np.flatnonzero(kept)
    velocities = labels.velocities
    if velocities is None:
        velocities = np.full((len(labels.boxes), 2), np.nan, np.float32)
    return Targets(
        labels.boxes[rows],
        velocities[rows],
        np.array([config.classes.index(labels.names[row]) for row in rows], np.int64),
    )


def encode_boxes(targets: Targets, config: HeadConfig) -> Floats:
    """Target values of the head's branches for each object: the inverse of `head.decode`.

    center = (xy − origin) / cell, height = z + h / 2 (the top of the box; z
    where `HeadConfig.height` is "centre"), dim = ln(w, l, h), rot =
    (−cos yaw, −sin yaw): sine and cosine of mmdetection3d 0.x' yaw, −yaw − π/2. Source:
    mit-bevfusion's TransFusionBBoxCoder; `decode` explains why height is the top.

    Args:
        targets: Targets of one frame.
        config: Configuration of the head.

    Returns:
        float32 [objects, 10]: center (2, in cells), height [m], dim (3, ln m), rot (2), vel
        (2, m/s; NaN where unknown).
    """
    boxes = targets.boxes.astype(np.float64)
    length, width, height = boxes[:, 3], boxes[:, 4], boxes[:, 5]
    code = np.concatenate(
        [
            _cells(boxes[:, :2], config),
            (boxes[:, 2] + height * config.center_drop)[:, None],
            np.log(np.stack([width, length, height], 1)),
            np.stack([-np.cos(boxes[:, 6]), -np.sin(boxes[:, 6])], 1),
            targets.velocities,
        ],
        axis=1,
    )
    return code.astype(np.float32)


def decode_boxes(code: npt.NDArray[np.floating], config: HeadConfig) -> npt.NDArray[np.float64]:
    """Boxes float64 [n, 7] of codes [n, 8 or more] of `encode_boxes`.

    Sizes are clamped to e^±5 m, so that an untrained head gives finite boxes.
    """
    code = np.asarray(code, np.float64)
    width, length, height = np.exp(np.clip(code[:, 3:6], -5.0, 5.0)).T
    return np.stack(
        [
            code[:, 0] * config.cell_size[0] + config.origin[0],
            code[:, 1] * config.cell_size[1] + config.origin[1],
            code[:, 2] - height * config.center_drop,
            length,
            width,
            height,
            np.arctan2(-code[:, 7], -code[:, 6]),
        ],
        axis=1,
    )


def _cells(xy: npt.NDArray[np.floating], config: MapSizes) -> npt.NDArray[np.float64]:
    cells: npt.NDArray[np.float64] = (xy.astype(np.float64) - config.origin) / config.cell_size
    return cells


def gaussian_radius(length: float, width: float, min_overlap: float = _MIN_OVERLAP) -> float:
    """Largest displacement of a corner, in cells, at which the box still overlaps itself enough.

    CornerNet (Law and Deng 2018, section 3.2; used by CenterNet, Zhou et al. 2019): the least of
    the roots r of three cases for a box l × w and an overlap o,

    - both corners move the same way: (l − r)(w − r) / (2lw − (l − r)(w − r)) = o,
    - both move inwards: (l − 2r)(w − 2r) / lw = o,
    - both move outwards: lw / ((l + 2r)(w + 2r)) = o.

    The smaller root of the first two and the positive root of the third are taken. mit-bevfusion's
    code divides by 2 where the quadratic formula has 2a, which enlarges the radius of its last two
    cases; here the formula is used.

    Args:
        length: Length of the box, in cells.
        width: Width of the box, in cells.
        min_overlap: Intersection over union, 0 to 1; mit-bevfusion's is 0.1.

    Example:
        >>> round(gaussian_radius(10.0, 10.0, 0.5), 4)  # outwards: (10 + 2r)² = 200
        1.4645
    """
    total, area, o = length + width, length * width, min_overlap
    same = (total - math.sqrt(total**2 - 4 * area * (1 - o) / (1 + o))) / 2
    inwards = (total - math.sqrt(total**2 - 4 * area * (1 - o))) / 4
    outwards = (-total + math.sqrt(total**2 + 4 * area * (1 - o) / o)) / 4
    return min(same, inwards, outwards)


def heatmap_target(targets: Targets, config: MapSizes) -> npt.NDArray[np.float32]:
    """Target heatmap: for each class the maximum of its objects' Gaussians.

    exp(−((i − i₀)² + (j − j₀)²) / 2σ²) with σ = (2r + 1) / 6, cut to |i − i₀|, |j − j₀| ≤ r, and 1
    in the object's own cell (i₀, j₀). r is `gaussian_radius` rounded down, with a minimum of one
    cell and of the whole cells in 1.2 m, which is mit-bevfusion's minimum of two cells of 0.6 m.

    Args:
        targets: Targets of one frame, all centres on the map.
        config: Configuration of the head.

    Returns:
        float32 [classes, x, y], from 0 to 1.
    """
    heatmap = np.zeros((config.num_classes, *config.map_size), np.float32)
    cell = np.array(config.cell_size)
    smallest = max(1, math.floor(_SMALLEST_RADIUS / max(config.cell_size) + 1e-6))
    middle = np.floor((targets.boxes[:, :2].astype(np.float64) - config.origin) / cell).astype(int)
    for (i, j), box, label in zip(middle, targets.boxes, targets.classes, strict=True):
        radius = gaussian_radius(float(box[3]) / cell[0], float(box[4]) / cell[1])
        r = max(smallest, int(radius))
        across = np.arange(-r, r + 1)
        squared = across[:, None] ** 2 + across[None, :] ** 2
        drawn = np.exp(-squared / (2 * ((2 * r + 1) / 6) ** 2)).astype(np.float32)
        x0, x1 = max(i - r, 0), min(i + r + 1, config.map_size[0])
        y0, y1 = max(j - r, 0), min(j + r + 1, config.map_size[1])
        part = heatmap[label, x0:x1, y0:y1]
        np.maximum(part, drawn[x0 - i + r : x1 - i + r, y0 - j + r : y1 - j + r], out=part)
    return heatmap


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
        cells = _frustum_cells(frames, motions, model)
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


def _frustum_cells(
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
