"""A spinning LiDAR: its beams, its pace and its errors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SpinningLidar:
    """A scanner with the elevations and the pace of the HDL-32E that nuScenes drove with.

    Args:
        beams: lasers, evenly spaced between the two elevations.
        azimuth_steps: firings per turn.
        elevation: lowest and highest beam [degrees].
        max_range: [m].
        height: of the scanner above the ground [m].
        range_noise: standard deviation of the range [m]; ranges come in steps of 2 mm.
        sweep_time: between two turns [s].

    Raises:
        ValueError: numbers that make no scanner.
    """

    beams: int = 32
    azimuth_steps: int = 1084
    elevation: tuple[float, float] = (-30.67, 10.67)
    max_range: float = 70.0
    height: float = 1.84
    range_noise: float = 0.015
    sweep_time: float = 0.05

    def __post_init__(self) -> None:
        if self.beams < 1 or self.azimuth_steps < 4:
            raise ValueError(
                f"beams={self.beams}, azimuth_steps={self.azimuth_steps}: at least 1 and 4"
            )
        low, high = self.elevation
        if not -90.0 < low <= high < 90.0:
            raise ValueError(f"elevation={self.elevation}: expected -90 < lowest ≤ highest < 90")
        if self.max_range <= 1.0 or self.height <= 0.0 or self.sweep_time <= 0.0:
            raise ValueError(
                f"max_range={self.max_range}, height={self.height}, sweep_time={self.sweep_time}: "
                "expected a range above 1 m, positive height and time"
            )
        if self.range_noise < 0.0:
            raise ValueError(f"range_noise={self.range_noise}: must not be negative")
