"""Points of a LiDAR, made up."""

from __future__ import annotations

import numpy as np

__all__ = ["cloud"]


def cloud(count: int = 3000, *, seed: int = 0) -> np.ndarray:
    """Points on a floor and a wall: x, y, z in metres, intensity, time lag."""
    rng = np.random.default_rng(seed)
    points = np.zeros((count, 5), np.float32)
    points[:, :2] = rng.uniform(-50, 50, (count, 2))
    points[:, 2] = np.where(rng.random(count) < 0.7, -1.8, rng.uniform(-1.8, 2, count))
    points[:, 3] = rng.integers(0, 256, count)
    return points
