"""The solids of a street as arrays: where they are at a time, which rays may hit them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bev_scenes._raycast import ground_heights
from bev_scenes._solids import units
from bev_scenes._street import Street

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SolidArrays:
    """All solids of a street as arrays, in their objects' frames.

    Args:
        owner: int64 [S], index of each solid's object.
        shape: int8 [S], `Shape`.
        centre: [S, 3] in the object's frame [m].
        turn: [S, 2] cosine and sine of each solid's heading in the world.
        half: [S, 3] half sizes [m].
        taper: [S, 2], see `Solid`.
        material: uint8 [S], `Material`.
        gain: [S], see `Solid`.
        at: [objects, 2] places at time 0 [m].
        velocity: [objects, 2] in the world [m/s].
        facing: [objects, 2] cosine and sine of the objects' headings.
    """

    owner: npt.NDArray[np.int64]
    shape: npt.NDArray[np.int8]
    centre: _Array
    turn: _Array
    half: _Array
    taper: _Array
    material: npt.NDArray[np.uint8]
    gain: _Array
    at: _Array
    velocity: _Array
    facing: _Array

    @property
    def radius(self) -> _Array:
        """Horizontal reach of each solid in any direction [m]."""
        return np.asarray(np.sqrt(self.half[:, 0] ** 2 + self.half[:, 1] ** 2))

    def reach(self, turn: _Array) -> _Array:
        """Half sizes [S, 3] of upright boxes around the solids, turned by `turn` [S, 2]."""
        (c, s), (a, b, up) = np.abs(turn).T, self.half.T
        return np.stack([a * c + b * s, a * s + b * c, up], 1)


def gather(street: Street) -> SolidArrays:
    things = street.objects
    owner = np.repeat(np.arange(len(things)), [len(thing.solids) for thing in things])
    listed = [solid for thing in things for solid in thing.solids]
    rows = np.array(
        [
            (*solid.centre, *solid.size, *solid.taper, solid.yaw, solid.gain, solid.shape,
             solid.material)
            for solid in listed
        ]
    )  # fmt: skip
    yaw = np.array([thing.yaw for thing in things])
    return SolidArrays(
        owner=owner,
        shape=rows[:, 10].astype(np.int8),
        centre=np.ascontiguousarray(rows[:, :3]),
        turn=units(rows[:, 8] + yaw[owner]),
        half=rows[:, 3:6] / 2,
        taper=np.ascontiguousarray(rows[:, 6:8]),
        material=rows[:, 11].astype(np.uint8),
        gain=np.ascontiguousarray(rows[:, 9]),
        at=np.array([(thing.x, thing.y) for thing in things]),
        velocity=np.array([thing.velocity for thing in things]),
        facing=units(yaw),
    )


def in_order(
    solids: SolidArrays, centre: _Array, order: npt.NDArray[np.int64], near: _Array
) -> tuple[npt.NDArray[Any], ...]:
    """The tuple of arrays that the kernels take; `near` is in that order already."""
    return (
        solids.shape[order],
        np.ascontiguousarray(centre[order]),
        solids.turn[order],
        solids.half[order],
        solids.taper[order],
        solids.material[order],
        near,
    )


def place(street: Street, solids: SolidArrays, time: float) -> _Array:
    """Centres of all solids in the world at `time`."""
    at = solids.at + solids.velocity * time
    level = ground_heights(at, street.ground.parameters, street.ground.bumps)
    owner = solids.owner
    (c, s), (x, y, z) = solids.facing[owner].T, solids.centre.T
    return np.stack(
        [at[owner, 0] + x * c - y * s, at[owner, 1] + x * s + y * c, level[owner] + z], 1
    )


def columns_of(
    centre: _Array, solids: SolidArrays, phase: float, step: float
) -> tuple[npt.NDArray[np.int64], _Array, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Solids from near to far, their nearest horizontal distances and the columns they may fill.

    The columns are a superset, one wider on each side than the angle asks for, so the last bit of
    an arctangent decides nothing.
    """
    radius = solids.radius
    away = np.sqrt(centre[:, 0] ** 2 + centre[:, 1] ** 2)
    near = np.maximum(away - radius, 0.0)
    order = np.argsort(near, kind="stable")
    middle = np.arctan2(centre[:, 1], centre[:, 0])
    spread = np.arcsin(np.minimum(radius / np.maximum(away, 1e-9), 1.0))
    spread = np.where(away <= radius * 1.001, math.pi, spread)
    first = np.floor((middle - spread - phase) / step).astype(np.int64) - 1
    last = np.ceil((middle + spread - phase) / step).astype(np.int64) + 1
    return order, near[order], first[order], last[order]
