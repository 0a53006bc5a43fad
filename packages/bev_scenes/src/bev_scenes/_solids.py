"""Parts of a scene: solids with a material, grouped into static or moving objects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Rng = np.random.Generator
Pair = tuple[float, float]
STILL = (0.0, 0.0)  # a velocity


class Shape(IntEnum):
    """Shape of a solid; every one stands upright and turns about the vertical alone."""

    BOX = 0
    CYLINDER = 1  # vertical axis, elliptic cross-section
    ELLIPSOID = 2
    WHEEL = 3  # a cylinder whose axis is the solid's own y
    TAPER = 4  # a box whose sides lean inwards: cabins, bonnets, gable and hip roofs


class Material(IntEnum):
    """Material of a surface: decides the intensity of a return, and whether there is one."""

    ASPHALT = 0
    MARKING = 1
    CONCRETE = 2
    GRASS = 3
    FACADE = 4  # a wall with a regular grid of windows
    WALL = 5
    GLASS = 6
    CAR_PAINT = 7
    RUBBER = 8
    METAL = 9
    FOLIAGE = 10  # lets a beam through to some depth
    BARK = 11
    CLOTH = 12
    SKIN = 13
    RETROREFLECTOR = 14
    PLASTIC = 15
    ROOF = 16
    WOOD = 17


# Material -> (share of the light sent back at normal incidence, chance that a beam is lost).
REFLECTIVITY: dict[Material, Pair] = {
    Material.ASPHALT: (0.07, 0.02),
    Material.MARKING: (0.38, 0.01),
    Material.CONCRETE: (0.16, 0.01),
    Material.GRASS: (0.13, 0.03),
    Material.FACADE: (0.20, 0.01),
    Material.WALL: (0.26, 0.01),
    Material.GLASS: (0.04, 0.55),
    Material.CAR_PAINT: (0.16, 0.06),
    Material.RUBBER: (0.03, 0.10),
    Material.METAL: (0.22, 0.03),
    Material.FOLIAGE: (0.11, 0.04),
    Material.BARK: (0.12, 0.02),
    Material.CLOTH: (0.14, 0.03),
    Material.SKIN: (0.24, 0.03),
    Material.RETROREFLECTOR: (1.60, 0.00),
    Material.PLASTIC: (0.22, 0.02),
    Material.ROOF: (0.15, 0.02),
    Material.WOOD: (0.17, 0.01),
}


@dataclass(frozen=True)
class Solid:
    """One solid of an object, in the object's own frame (x along its length, z up).

    Args:
        shape: box, cylinder, ellipsoid, wheel or tapered box.
        centre: x, y, z [m] of the middle; z = 0 is the ground under the object.
        size: full extents along the solid's own x, y, z [m].
        material: surface.
        yaw: turn about the vertical against the object's frame [rad].
        gain: factor on the reflectivity (light and dark paint, clothes, walls).
        taper: by which share the top of a `TAPER` is shorter along x and along y than its foot;
            (0, 1) is a gable roof with its ridge along x.
    """

    shape: Shape
    centre: tuple[float, float, float]
    size: tuple[float, float, float]
    material: Material
    yaw: float = 0.0
    gain: float = 1.0
    taper: Pair = (0.0, 0.0)


@dataclass(frozen=True)
class SceneObject:
    """A static or moving object of the scene.

    Args:
        name: class, a nuScenes detection name where `labelled`.
        x: position in the world at time 0 [m].
        y: position in the world at time 0 [m].
        yaw: counter-clockwise from the world's +x to the object's length [rad].
        size: length, width, height of the box around it [m].
        solids: its solids.
        velocity: x and y components in the world [m/s].
        labelled: whether a detector should find it.
    """

    name: str
    x: float
    y: float
    yaw: float
    size: tuple[float, float, float]
    solids: tuple[Solid, ...]
    velocity: Pair = STILL
    labelled: bool = False

    def at(self, time: float) -> Pair:
        """Position in the world [m] at `time` [s]; the velocity is constant."""
        return self.x + self.velocity[0] * time, self.y + self.velocity[1] * time


def unit(angle: float) -> Pair:
    """Cosine and sine, rounded to 12 decimals.

    Mathematical libraries differ in the last bit; rounded far above it, all machines agree, and
    everything after this is plain IEEE arithmetic.
    """
    return round(math.cos(angle), 12), round(math.sin(angle), 12)


def units(angles: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Cosines and sines of many angles, [angles, 2], rounded as `unit` does."""
    return np.round(np.stack([np.cos(angles), np.sin(angles)], 1), 12)
