"""The ground of a street: a sloped plane with crowned roads, curbs, sidewalks and uneven lawns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bev_scenes._raycast import ground_height

_CELLS = 91  # every 2 m, ±90 m


@dataclass(frozen=True, eq=False)
class Ground:
    """Height field of a street along y with a side street along x.

    Args:
        slope_x: rise across the street [m/m].
        slope_y: rise along the street [m/m].
        crown: fall of the carriageway from its middle to its edge [m/m].
        half_width: half the carriageway, parking lanes included [m].
        sidewalk: width of the sidewalks [m].
        curb: height of the curb [m].
        side_y: where the side street crosses [m].
        side_half_width: half of its carriageway [m].
        bumps: float64 [91, 91], heights of the uneven ground every 2 m, the middle at the origin.
    """

    slope_x: float
    slope_y: float
    crown: float
    half_width: float
    sidewalk: float
    curb: float
    side_y: float
    side_half_width: float
    bumps: npt.NDArray[np.float64]

    @property
    def zebra_y(self) -> float:
        """Middle of the zebra crossing before the side street [m]."""
        return self.side_y - self.side_half_width - 2.5

    @cached_property
    def parameters(self) -> npt.NDArray[np.float64]:
        """The numbers that `ground_height` takes, in its order."""
        top = max(self.curb - self.crown * self.half_width + float(self.bumps.max()), self.curb)
        return np.array([
            self.slope_x, self.slope_y, self.crown, self.half_width, self.sidewalk, self.curb,
            self.side_y, self.side_half_width, top,
        ])  # fmt: skip

    def height(self, x: float, y: float) -> float:
        """Height of the ground at a point of the world [m]."""
        return float(ground_height(x, y, self.parameters, self.bumps))

    def at_crossing(self, y: float, margin: float) -> bool:
        """Whether a place along the street is on the side street or within `margin` [m] of it."""
        return abs(y - self.side_y) < self.side_half_width + margin


def make_ground(rng: np.random.Generator, slopes: float = 1.0) -> Ground:
    """A ground with slopes of up to 1.5 % · `slopes`, seeded by `rng`."""
    coarse = rng.uniform(-0.35, 0.35, (14, 14))
    places = np.linspace(0.0, 12.999, _CELLS)
    cell = places.astype(np.int64)
    # Smoothstep between the corners keeps slopes finite and needs no function of a math library.
    part = places - cell
    part = part * part * (3.0 - 2.0 * part)
    rows = coarse[cell] * (1.0 - part)[:, None] + coarse[cell + 1] * part[:, None]
    bumps = rows[:, cell] * (1.0 - part) + rows[:, cell + 1] * part
    return Ground(
        slope_x=slopes * float(rng.uniform(-0.006, 0.006)),
        slope_y=slopes * float(rng.uniform(-0.015, 0.015)),
        crown=0.018,
        half_width=float(rng.uniform(6.4, 7.2)),
        sidewalk=float(rng.uniform(2.6, 3.6)),
        curb=0.14,
        side_y=float(rng.uniform(20.0, 30.0)),
        side_half_width=float(rng.uniform(3.6, 4.4)),
        bumps=np.ascontiguousarray(bumps),
    )
