"""Boxes of the labelled objects in the scanner's frame."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bevfusion_quant.points import Labels
from bevfusion_quant.scenes._street import Street

__all__ = ["Pose", "into_frame", "labels_of"]

_Array = npt.NDArray[np.float64]
Pose = tuple[_Array, tuple[float, float]]  # origin in the world, cosine and sine of its turn


def into_frame(world: _Array, pose: Pose) -> _Array:
    origin, (c, s) = pose
    x, y, z = (world - origin).T
    return np.stack([x * c + y * s, y * c - x * s, z], 1)


def labels_of(
    street: Street,
    objects: npt.NDArray[np.int32],
    now: Pose,
) -> tuple[Labels, npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    counts = np.bincount(objects[objects >= 0], minlength=len(street.objects))
    boxes, names, velocities, seen = [], [], [], []
    c, s = now[1]
    for k, thing in enumerate(street.objects):
        if not thing.labelled or counts[k] == 0:
            continue
        x, y = thing.at(0.0)
        middle = np.array([[x, y, street.ground.height(x, y) + thing.size[2] / 2]])
        yaw = thing.yaw - math.atan2(s, c)
        yaw = round(yaw - 2 * math.pi * math.floor((yaw + math.pi) / (2 * math.pi)), 9)
        vx, vy = thing.velocity
        boxes.append([*into_frame(middle, now)[0], *thing.size, yaw])
        names.append(thing.name)
        velocities.append([vx * c + vy * s, vy * c - vx * s])
        seen.append(counts[k])
    return (
        Labels(np.array(boxes, np.float32).reshape(-1, 7), tuple(names)),
        np.array(velocities, np.float32).reshape(-1, 2),
        np.array(seen, np.int32),
    )
