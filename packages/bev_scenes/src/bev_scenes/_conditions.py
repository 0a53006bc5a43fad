"""Weather, light and faults under which a street is seen; they change no bit of a clear street."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[np.float64]
_DROPLET = 0.002  # largest share of the light that a drop sends back: seen up to 15 m away


@dataclass(frozen=True)
class Conditions:
    r"""Conditions of a frame.

    Drops take light from the beam, on the way there and back, and send a part of it to the scanner:

    .. math:: I = I_0 e^{-2 \alpha d}, \quad
              \alpha = \frac{\ln 20}{\text{fog}}
                       + \frac{\ln 10}{10^4} \cdot 1.076\, \text{rain}^{0.67}

    per metre (fog: definition of the meteorological optical range; rain: Carbonneau's law, ITU-R
    P.1814). A beam meets its first drop at an exponentially distributed distance of rate α. It
    returns the drop where the drop is near enough to be seen, up to 15 m, and else the surface.
    In pictures half of what is seen at a distance ln 2 / α is haze.

    Args:
        rain: rate [mm/h]; above 10 is heavy rain.
        fog: meteorological optical range [m]; dense fog is below 50.
        night: 5 % of the day's light, with a camera's noise. The LiDAR brings its own light.
        beams: lasers instead of the scan's, between the same elevations.
        blocked: share of the beams that return nothing, drawn for each street.
        slopes: factor of the ground's slopes, which are up to 1.5 % in a clear street.
        pose_error: standard deviation of the position that an earlier turn is moved to the newest
            one by [m]; its heading is off by as much per 10 m.

    Raises:
        ValueError: numbers that are no weather or no scanner.
    """

    rain: float = 0.0
    fog: float = math.inf
    night: bool = False
    beams: int | None = None
    blocked: float = 0.0
    slopes: float = 1.0
    pose_error: float = 0.0

    def __post_init__(self) -> None:
        if not (0.0 <= self.rain < math.inf and self.fog >= 5.0):
            raise ValueError(
                f"rain={self.rain}, fog={self.fog}: expected mm/h from 0, and a "
                "range of 5 m or more"
            )
        if not (0.0 <= self.blocked < 1.0 and 0.0 <= self.pose_error < math.inf):
            raise ValueError(
                f"blocked={self.blocked}, pose_error={self.pose_error}: expected a share below 1, "
                "and metres from 0"
            )
        if not 0.0 <= self.slopes <= 8.0:
            raise ValueError(f"slopes={self.slopes}: expected a factor from 0 to 8")

    @property
    def extinction(self) -> float:
        """Share of the light that is lost per metre [1/m]."""
        rain = 1.076 * self.rain**0.67 * math.log(10.0) / 1e4
        return float(math.log(20.0) / self.fog + rain)

    def drops(
        self, shape: tuple[int, int], far: float, rng: np.random.Generator
    ) -> tuple[_Array, _Array]:
        """Distance [m] of each beam's first drop, at most `far`, and share of light it returns."""
        if self.extinction == 0.0:
            return np.full(shape, far), np.zeros(shape)
        distance = rng.standard_exponential(shape) / self.extinction
        return np.minimum(distance, far), _DROPLET * rng.random(shape)

    def open_beams(self, beams: int, seed: int) -> npt.NDArray[np.bool_]:
        """Which beams of a street's scanner return anything."""
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 6])))
        return np.asarray(rng.permutation(beams) >= round(self.blocked * beams))

    def displaced(self, points: _Array, rng: np.random.Generator) -> _Array:
        """Points [n, 3] of an earlier turn where its pose's error puts them."""
        if self.pose_error == 0.0:
            return points
        x, y, turn = self.pose_error * rng.standard_normal(3)
        c, s = math.cos(turn / 10.0), math.sin(turn / 10.0)
        turned = points @ np.array([[c, s, 0.0], [-s, c, 0.0], [0.0, 0.0, 1.0]])
        return np.asarray(turned + np.array([x, y, 0.0]))


CLEAR = Conditions()
CONDITIONS: dict[str, Conditions] = {
    "clear": CLEAR,
    "rain": Conditions(rain=25.0),
    "fog": Conditions(fog=100.0),
    "night": Conditions(night=True),
    "beams16": Conditions(beams=16),
    "beams64": Conditions(beams=64),
    "blocked": Conditions(blocked=0.25),
    "hills": Conditions(slopes=5.0),
    "pose_error": Conditions(pose_error=0.1),
}
"""Conditions by name."""
