"""Boxes of the labelled objects in the scanner's frame."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bev_data.points import Labels
from bev_scenes._raycast import ground_heights
from bev_scenes._solid_arrays import SolidArrays
from bev_scenes._solids import unit
from bev_scenes._street import Street
from bev_scenes._visibility import visible_shares

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
    c, s = now[1]
    middle, size = _tight_boxes(solids, listed)
    at, velocity, facing = solids.at[listed], solids.velocity[listed], solids.facing[listed]
    level = ground_heights(at, street.ground.parameters, street.ground.bumps)
    world = np.stack(
        [
            at[:, 0] + middle[:, 0] * facing[:, 0] - middle[:, 1] * facing[:, 1],
            at[:, 1] + middle[:, 0] * facing[:, 1] + middle[:, 1] * facing[:, 0],
            level + middle[:, 2],
        ],
        1,
    )
    yaw = np.array([street.objects[k].yaw for k in listed]) - math.atan2(s, c)
    yaw = np.round(yaw - 2 * math.pi * np.floor((yaw + math.pi) / (2 * math.pi)), 9)
    boxes = np.concatenate([into_frame(world, now), size, yaw[:, None]], 1)
    velocity = np.stack(
        [velocity[:, 0] * c + velocity[:, 1] * s, velocity[:, 1] * c - velocity[:, 0] * s], 1
    )
    return Labels(
        boxes.astype(np.float32),
        tuple(street.objects[k].name for k in listed),
        velocity.astype(np.float32),
        visible_shares(street, solids, np.array(listed, np.int64), now[0]),
        counts[listed].astype(np.int32),
    )


def _tight_boxes(solids: SolidArrays, wanted: list[int]) -> tuple[_Array, _Array]:
    """Middles and sizes [objects, 3] of the smallest boxes around solids, in objects' frames."""
    (fc, fs), (tc, ts) = solids.facing[solids.owner].T, solids.turn.T
    c, s = np.abs(fc * tc + fs * ts), np.abs(fc * ts - fs * tc)  # turned against the object
    a, b, up = solids.half.T
    reach = np.stack([a * c + b * s, a * s + b * c, up], 1)
    first = np.searchsorted(solids.owner, np.arange(len(solids.at)))
    low = np.minimum.reduceat(solids.centre - reach, first)[wanted]
    high = np.maximum.reduceat(solids.centre + reach, first)[wanted]
    low[:, 2] = np.maximum(low[:, 2], 0.0)  # what is sunk into the ground nobody sees
    return (low + high) / 2, high - low
