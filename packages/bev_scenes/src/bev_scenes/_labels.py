"""Boxes of the labelled objects in the scanner's frame, and their visibility."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bev_data.points import Labels
from bev_scenes._candidates import candidates_by_column
from bev_scenes._raycast import ground_heights, silhouettes
from bev_scenes._solid_arrays import SolidArrays, columns_of, in_order, place
from bev_scenes._solids import unit
from bev_scenes._street import Street

_Array = npt.NDArray[np.float64]
Pose = tuple[_Array, tuple[float, float]]  # origin in the world, cosine and sine of its turn
_COLUMNS = 360
_ACROSS, _DOWN = 20, 10  # samples of an object's outline box
_FAR = 200.0  # m


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
    """Labels of objects with returns; `objects` holds the object of each return."""
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
        _visible_shares(street, solids, np.array(listed, np.int64), now[0]),
        counts[listed].astype(np.int32),
    )


def _tight_boxes(solids: SolidArrays, wanted: list[int]) -> tuple[_Array, _Array]:
    """Middles and sizes [objects, 3] of the smallest boxes around solids, in objects' frames."""
    (fc, fs), (tc, ts) = solids.facing[solids.owner].T, solids.turn.T
    against_object = np.stack([fc * tc + fs * ts, fc * ts - fs * tc], 1)
    reach = solids.reach(against_object)
    first = np.searchsorted(solids.owner, np.arange(len(solids.at)))
    low = np.minimum.reduceat(solids.centre - reach, first)[wanted]
    high = np.maximum.reduceat(solids.centre + reach, first)[wanted]
    low[:, 2] = np.maximum(low[:, 2], 0.0)  # what is sunk into the ground nobody sees
    return (low + high) / 2, high - low


def _visible_shares(
    street: Street, solids: SolidArrays, wanted: npt.NDArray[np.int64], origin: _Array
) -> npt.NDArray[np.float32]:
    """Share of each object's silhouette that nothing hides at time 0, float32 [objects], 0 to 1.

    The silhouette is what the object would cover, seen from `origin`, if it stood on the ground
    alone. It is sampled by 20 × 10 rays through the rectangle of azimuth and slope around the
    object; the share is that of the rays that still meet the object first in the whole scene.
    nuScenes' visibility is the same share over the six pictures' pixels.

    Args:
        street: the scene.
        solids: its solids.
        wanted: the objects, as indices into `Street.objects`.
        origin: where from, x, y, z in the world [m].
    """
    centre = place(street, solids, 0.0) - origin
    step = 2 * math.pi / _COLUMNS
    order, near, first, last = columns_of(centre, solids, 0.0, step)
    owner = solids.owner[order]
    by_object = np.argsort(owner, kind="stable")  # each object's solids, the nearest first
    starts = np.searchsorted(owner[by_object], np.arange(len(street.objects) + 1))
    directions, column = _samples(centre, solids, wanted, step)
    rays = _ACROSS * _DOWN
    alone, seen = silhouettes(
        directions,
        column,
        np.repeat(wanted, rays),
        candidates_by_column(first, last, _COLUMNS),
        (starts, by_object.astype(np.int32)),
        owner,
        in_order(solids, centre, order, near),
        origin,
        street.ground.parameters,
        street.ground.bumps,
        _FAR,
    )
    total = alone.reshape(-1, rays).sum(1)
    shares: npt.NDArray[np.float32] = np.divide(
        seen.reshape(-1, rays).sum(1), np.maximum(total, 1), dtype=np.float32
    )
    return shares


def _samples(
    centre: _Array, solids: SolidArrays, wanted: npt.NDArray[np.int64], step: float
) -> tuple[_Array, npt.NDArray[np.int64]]:
    """Unit vectors [objects · rays, 3] through each object's outline box, and their columns."""
    across = (np.arange(_ACROSS) + 0.5) / _ACROSS
    down = (np.arange(_DOWN) + 0.5) / _DOWN
    directions = np.empty((len(wanted), _DOWN, _ACROSS, 3))
    reach, radius = solids.reach(solids.turn), solids.radius
    ends = np.searchsorted(solids.owner, np.stack([wanted, wanted + 1]))
    for row, (begin, end) in enumerate(ends.T):
        mine = slice(begin, end)
        x, y, z = centre[mine].T
        # Turned so that the object's middle lies ahead; plain arithmetic, the same everywhere.
        ahead = np.array([x.mean(), y.mean()])
        ahead /= np.sqrt(ahead @ ahead)
        forth = x * ahead[0] + y * ahead[1]
        aside = y * ahead[0] - x * ahead[1]
        closest = np.maximum(forth - radius[mine], 0.5)
        left = ((aside + radius[mine]) / np.where(aside > -radius[mine], closest, forth)).max()
        right = ((aside - radius[mine]) / np.where(aside < radius[mine], closest, forth)).min()
        farthest = forth + radius[mine]
        top, foot = z + reach[mine, 2], z - reach[mine, 2]
        high = np.where(top > 0, top / closest, top / farthest).max()
        low = np.where(foot < 0, foot / closest, foot / farthest).min()
        side = right + (left - right) * across
        wide = np.sqrt(1.0 + side * side)
        rise = low + (high - low) * down
        steep = np.sqrt(1.0 + rise * rise)[:, None]
        directions[row, :, :, 0] = (ahead[0] - ahead[1] * side) / wide / steep
        directions[row, :, :, 1] = (ahead[1] + ahead[0] * side) / wide / steep
        directions[row, :, :, 2] = rise[:, None] / steep
    flat = directions.reshape(-1, 3)
    column = np.floor(np.arctan2(flat[:, 1], flat[:, 0]) / step).astype(np.int64)
    return flat, column % (2 * round(math.pi / step))
