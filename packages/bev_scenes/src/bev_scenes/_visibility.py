"""How much of an object is to be seen from the scanner's place."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bev_scenes._candidates import candidates_by_column
from bev_scenes._raycast import silhouettes
from bev_scenes._solid_arrays import SolidArrays, columns_of, in_order, place
from bev_scenes._street import Street

__all__ = ["visible_shares"]

_Array = npt.NDArray[np.float64]
_COLUMNS = 360
_ACROSS, _DOWN = 20, 10  # samples of an object's outline box
_FAR = 200.0  # m


def visible_shares(
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
    c, s = np.abs(solids.turn).T
    reach = np.stack(
        [
            solids.half[:, 0] * c + solids.half[:, 1] * s,
            solids.half[:, 0] * s + solids.half[:, 1] * c,
            solids.half[:, 2],
        ],
        1,
    )
    radius = np.sqrt(solids.half[:, 0] ** 2 + solids.half[:, 1] ** 2)
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
