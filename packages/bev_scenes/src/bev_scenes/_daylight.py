"""The light of a scene: where the sun stands, how bright and how clear the sky is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bev_scenes._solids import unit

__all__ = ["Daylight", "make_daylight"]

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Daylight:
    """Sun and sky; colours are linear red, green, blue, where 1 is a white sheet in the sun.

    Args:
        towards: unit vector to the sun, in the world.
        sun: light of the sun on a surface that faces it.
        ambient: light of the sky on a surface that faces up.
        horizon: colour of the sky at the horizon, and of the haze.
        zenith: colour of the sky overhead.
        clouds: share of the sky that they cover, 0 to 1.
    """

    towards: _Array
    sun: _Array
    ambient: _Array
    horizon: _Array
    zenith: _Array
    clouds: float

    @property
    def numbers(self) -> _Array:
        """[6, 3], the rows that the shader takes: the fields in order, clouds in the last."""
        last = np.array([self.clouds, 0.0, 0.0])
        return np.stack([self.towards, self.sun, self.ambient, self.horizon, self.zenith, last])


def make_daylight(rng: np.random.Generator) -> Daylight:
    """A day between clear and hazy, the sun 28 to 62 degrees up; low ones are warmer."""
    around, up = float(rng.uniform(0.0, 2 * math.pi)), float(rng.uniform(28.0, 62.0))
    (c, s), (flat, high) = unit(around), unit(math.radians(up))
    clouds = float(rng.uniform(0.1, 0.6))
    warm = (62.0 - up) / 34.0
    strength = 1.4 - 0.4 * clouds
    return Daylight(
        towards=np.array([c * flat, s * flat, high]),
        sun=strength * np.array([1.0, 0.96 - 0.08 * warm, 0.88 - 0.2 * warm]),
        ambient=(0.36 + 0.16 * clouds) * np.array([0.88, 0.97, 1.12]),
        horizon=np.array([0.68, 0.75, 0.82]) - 0.06 * warm * np.array([0.0, 0.5, 1.0]),
        zenith=np.array([0.10, 0.24, 0.55]) + 0.15 * clouds,
        clouds=clouds,
    )
