"""The heatmap that the head should draw: a Gaussian around each object's cell."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from bevfusion.model.head import HeadConfig
    from bevfusion.training._targets import Targets

__all__ = ["gaussian_radius", "heatmap_target"]

MIN_OVERLAP = 0.1
SMALLEST_RADIUS = 1.2  # m: two of mit-bevfusion's 0.6 m cells


def gaussian_radius(length: float, width: float, min_overlap: float = MIN_OVERLAP) -> float:
    """How far, in cells, a corner may move before the box no longer overlaps itself enough.

    CornerNet (Law and Deng 2018, section 3.2; used by CenterNet, Zhou et al. 2019): the least of
    the roots r of three cases for a box l × w and an overlap o,

    - both corners move the same way: (l − r)(w − r) / (2lw − (l − r)(w − r)) = o,
    - both move inwards: (l − 2r)(w − 2r) / lw = o,
    - both move outwards: lw / ((l + 2r)(w + 2r)) = o.

    The smaller root of the first two and the positive one of the third are taken. The code that
    mit-bevfusion uses divides by 2 where the quadratic formula says 2a, which makes the radius of
    its last two cases larger; here the formula stands.

    Args:
        length: Of the box, in cells.
        width: Of the box, in cells.
        min_overlap: Intersection over union, 0 to 1; mit-bevfusion's is 0.1.

    Example:
        >>> round(gaussian_radius(10.0, 10.0, 0.5), 4)  # outwards: (10 + 2r)² = 200
        1.4645
    """
    total, area, o = length + width, length * width, min_overlap
    same = (total - math.sqrt(total**2 - 4 * area * (1 - o) / (1 + o))) / 2
    inwards = (total - math.sqrt(total**2 - 4 * area * (1 - o))) / 4
    outwards = (-total + math.sqrt(total**2 + 4 * area * (1 - o) / o)) / 4
    return min(same, inwards, outwards)


def heatmap_target(targets: Targets, config: HeadConfig) -> npt.NDArray[np.float32]:
    """The heatmap to learn: per class the largest of its objects' Gaussians.

    exp(−((i − i₀)² + (j − j₀)²) / 2σ²) with σ = (2r + 1) / 6, cut to |i − i₀|, |j − j₀| ≤ r, and 1
    in the object's own cell (i₀, j₀). r is `gaussian_radius` rounded down, and at least as many
    whole cells as 1.2 m hold, and one: mit-bevfusion's least radius, two cells of 0.6 m, in metres.

    Args:
        targets: Of one frame, all centres on the map.
        config: Of the head.

    Returns:
        float32 [classes, x, y], from 0 to 1.
    """
    heatmap = np.zeros((config.num_classes, *config.map_size), np.float32)
    cell = np.array(config.cell_size)
    smallest = max(1, math.floor(SMALLEST_RADIUS / max(config.cell_size) + 1e-6))
    middle = np.floor((targets.boxes[:, :2].astype(np.float64) - config.origin) / cell).astype(int)
    for (i, j), box, label in zip(middle, targets.boxes, targets.classes, strict=True):
        radius = gaussian_radius(float(box[3]) / cell[0], float(box[4]) / cell[1])
        r = max(smallest, int(radius))
        across = np.arange(-r, r + 1)
        squared = across[:, None] ** 2 + across[None, :] ** 2
        drawn = np.exp(-squared / (2 * ((2 * r + 1) / 6) ** 2)).astype(np.float32)
        x0, x1 = max(i - r, 0), min(i + r + 1, config.map_size[0])
        y0, y1 = max(j - r, 0), min(j + r + 1, config.map_size[1])
        part = heatmap[label, x0:x1, y0:y1]
        np.maximum(part, drawn[x0 - i + r : x1 - i + r, y0 - j + r : y1 - j + r], out=part)
    return heatmap
