"""What the head should answer for a frame's labels, in the head's own units."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from bev_data.points import Labels
    from bevfusion.model.head import HeadConfig

__all__ = ["Targets", "decode_boxes", "encode_boxes", "targets_of"]

Floats = npt.NDArray[np.float32]


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


def targets_of(labels: Labels, config: HeadConfig) -> Targets:
    """The labels of the head's classes with the centre on its map and at least one LiDAR point.

    nuScenes leaves boxes without a point out of its evaluation too; labels that do not count their
    points all stay.

    Args:
        labels: Of one frame; an augmentation comes before.
        config: Of the head.
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
    """What the head's branches should say of each object: the inverse of `head.decode`.

    center = (xy − origin) / cell, height = z + h / 2 (the top of the box), dim = ln(w, l, h), rot =
    (−cos yaw, −sin yaw): sine and cosine of mmdetection3d 0.x' yaw, −yaw − π/2. Source:
    mit-bevfusion's TransFusionBBoxCoder; `decode` tells why height is the top.

    Args:
        targets: Of one frame.
        config: Of the head.

    Returns:
        float32 [objects, 10]: center (2, in cells), height [m], dim (3, ln m), rot (2), vel
        (2, m/s; NaN where not known).
    """
    boxes = targets.boxes.astype(np.float64)
    length, width, height = boxes[:, 3], boxes[:, 4], boxes[:, 5]
    code = np.concatenate(
        [
            _cells(boxes[:, :2], config),
            (boxes[:, 2] + height / 2)[:, None],
            np.log(np.stack([width, length, height], 1)),
            np.stack([-np.cos(boxes[:, 6]), -np.sin(boxes[:, 6])], 1),
            targets.velocities,
        ],
        axis=1,
    )
    return code.astype(np.float32)


def decode_boxes(code: npt.NDArray[np.floating], config: HeadConfig) -> npt.NDArray[np.float64]:
    """Boxes float64 [n, 7] of codes [n, 8 or more], as `encode_boxes` makes them.

    Sizes are bounded to e^±5 m, so that a head that has learned nothing yet makes boxes too.
    """
    code = np.asarray(code, np.float64)
    width, length, height = np.exp(np.clip(code[:, 3:6], -5.0, 5.0)).T
    return np.stack(
        [
            code[:, 0] * config.cell_size[0] + config.origin[0],
            code[:, 1] * config.cell_size[1] + config.origin[1],
            code[:, 2] - height / 2,
            length,
            width,
            height,
            np.arctan2(-code[:, 7], -code[:, 6]),
        ],
        axis=1,
    )


def _cells(xy: npt.NDArray[np.floating], config: HeadConfig) -> npt.NDArray[np.float64]:
    cells: npt.NDArray[np.float64] = (xy.astype(np.float64) - config.origin) / config.cell_size
    return cells
