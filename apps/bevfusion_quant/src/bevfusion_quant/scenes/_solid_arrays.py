"""The solids of a street as arrays: where they are at a time, which rays may hit them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bevfusion_quant.scenes._solids import unit
from bevfusion_quant.scenes._street import Street

__all__ = ["SolidArrays", "columns_of", "gather", "in_order", "place"]

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SolidArrays:
    """All solids of a street as arrays, in their objects' frames."""

    owner: npt.NDArray[np.int64]
    shape: npt.NDArray[np.int8]
    centre: _Array
    turn: _Array
    half: _Array
    taper: _Array
    material: npt.NDArray[np.uint8]
    gain: _Array


def gather(street: Street) -> SolidArrays:
    listed = [(k, solid) for k, thing in enumerate(street.objects) for solid in thing.solids]
    return SolidArrays(
        owner=np.array([k for k, _ in listed], np.int64),
        shape=np.array([solid.shape for _, solid in listed], np.int8),
        centre=np.array([solid.centre for _, solid in listed], np.float64),
        turn=np.array([unit(solid.yaw + street.objects[k].yaw) for k, solid in listed]),
        half=np.array([solid.size for _, solid in listed], np.float64) / 2,
        taper=np.array([solid.taper for _, solid in listed], np.float64),
        material=np.array([solid.material for _, solid in listed], np.uint8),
        gain=np.array([solid.gain for _, solid in listed], np.float64),
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
    places = []
    for thing in street.objects:
        x, y = thing.at(time)
        places.append((x, y, street.ground.height(x, y), *unit(thing.yaw)))
    at = np.array(places)[solids.owner]
    x, y, z = solids.centre.T
    return np.stack(
        [at[:, 0] + x * at[:, 3] - y * at[:, 4], at[:, 1] + x * at[:, 4] + y * at[:, 3],
         at[:, 2] + z], 1,
    )  # fmt: skip


def columns_of(
    centre: _Array, solids: SolidArrays, phase: float, step: float
) -> tuple[npt.NDArray[np.int64], _Array, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Solids from near to far, their nearest horizontal distances and the columns they may fill.

    The columns are a superset, one wider on each side than the angle asks for, so the last bit of
    an arctangent decides nothing.
    """
    radius = np.sqrt(solids.half[:, 0] ** 2 + solids.half[:, 1] ** 2)
    away = np.sqrt(centre[:, 0] ** 2 + centre[:, 1] ** 2)
    near = np.maximum(away - radius, 0.0)
    order = np.argsort(near, kind="stable")
    middle = np.arctan2(centre[:, 1], centre[:, 0])
    spread = np.arcsin(np.minimum(radius / np.maximum(away, 1e-9), 1.0))
    spread = np.where(away <= radius * 1.001, math.pi, spread)
    first = np.floor((middle - spread - phase) / step).astype(np.int64) - 1
    last = np.ceil((middle + spread - phase) / step).astype(np.int64) + 1
    return order, near[order], first[order], last[order]
