"""Boxes of the labelled objects in the scanner's frame."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bevfusion_quant.points import Labels
from bevfusion_quant.scenes._solid_arrays import SolidArrays
from bevfusion_quant.scenes._solids import SceneObject, unit
from bevfusion_quant.scenes._street import Street
from bevfusion_quant.scenes._visibility import visible_shares

__all__ = ["Pose", "into_frame", "labels_of", "scanner_pose"]

_Array = npt.NDArray[np.float64]
Pose = tuple[_Array, tuple[float, float]]  # origin in the world, cosine and sine of its turn


def scanner_pose(street: Street, height: float, time: float = 0.0) -> Pose:
    """Where a scanner `height` metres above the ground is, and how its x is turned."""
    x, y, yaw = street.ego.at(time)
    origin = np.array([x, y, street.ground.height(x, y) + height])
    return origin, unit(yaw - math.pi / 2)  # y is forward


def into_frame(world: _Array, pose: Pose) -> _Array:
    origin, (c, s) = pose
    x, y, z = (world - origin).T
    return np.stack([x * c + y * s, y * c - x * s, z], 1)


def labels_of(
    street: Street, solids: SolidArrays, objects: npt.NDArray[np.int32], now: Pose
) -> Labels:
    """Labels of what has returns; `objects` names the object of each return."""
    counts = np.bincount(objects[objects >= 0], minlength=len(street.objects))
    listed = [k for k, thing in enumerate(street.objects) if thing.labelled and counts[k] > 0]
    boxes, velocities = [], []
    c, s = now[1]
    for k in listed:
        thing = street.objects[k]
        x, y = thing.at(0.0)
        (right, ahead, up), size = _tight_box(thing)
        tc, ts = unit(thing.yaw)
        middle = np.array([[
            x + right * tc - ahead * ts, y + right * ts + ahead * tc,
            street.ground.height(x, y) + up,
        ]])  # fmt: skip
        yaw = thing.yaw - math.atan2(s, c)
        yaw = round(yaw - 2 * math.pi * math.floor((yaw + math.pi) / (2 * math.pi)), 9)
        vx, vy = thing.velocity
        boxes.append([*into_frame(middle, now)[0], *size, yaw])
        velocities.append([vx * c + vy * s, vy * c - vx * s])
    return Labels(
        np.array(boxes, np.float32).reshape(-1, 7),
        tuple(street.objects[k].name for k in listed),
        np.array(velocities, np.float32).reshape(-1, 2),
        visible_shares(street, solids, np.array(listed, np.int64), now[0]),
        counts[listed].astype(np.int32),
    )


def _tight_box(thing: SceneObject) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Middle and size of the smallest box around an object's solids, in the object's frame."""
    low, high = [math.inf] * 3, [-math.inf] * 3
    for solid in thing.solids:
        c, s = (abs(part) for part in unit(solid.yaw))
        a, b, height = (side / 2 for side in solid.size)
        for k, reach in enumerate((a * c + b * s, a * s + b * c, height)):
            low[k] = min(low[k], solid.centre[k] - reach)
            high[k] = max(high[k], solid.centre[k] + reach)
    low[2] = max(low[2], 0.0)  # what is sunk into the ground nobody sees
    ends = list(zip(low, high, strict=True))
    return tuple((a + b) / 2 for a, b in ends), tuple(b - a for a, b in ends)
