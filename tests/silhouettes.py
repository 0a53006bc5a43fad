"""Do points and images of the same frame fit? For the tests of data sets and of streets."""

from __future__ import annotations

import numpy as np

from bev_data.cameras import Camera, project

__all__ = ["agreement", "assert_sharpest_unmoved"]

SHIFTS = range(-40, 41, 8)  # pixels


def silhouettes(camera: Camera, points: np.ndarray, band: int, gap: int, ratio: float):
    """Pixels between neighbours in a row of returns of which one is `ratio` times as far."""
    pixels, depth = project(camera, points)
    with np.errstate(invalid="ignore"):
        seen = (pixels > [50, 0]) & (pixels < [camera.width - 50, camera.height])
    seen = seen.all(axis=1) & (depth > 1)
    pixels, depth = pixels[seen], depth[seen]
    row = pixels[:, 1] // band
    order = np.lexsort((pixels[:, 0], row))
    pixels, depth, row = pixels[order], depth[order], row[order]
    beside = (row[1:] == row[:-1]) & (np.diff(pixels[:, 0]) < gap)
    far = depth[1:] / depth[:-1]
    jump = np.flatnonzero(beside & ((far > ratio) | (far < 1 / ratio)))
    return ((pixels[jump] + pixels[jump + 1]) / 2).astype(int)


def agreement(frames, *, band: int, gap: int, ratio: float) -> np.ndarray:
    """Mean contrast of the image at the silhouettes, moved sideways by each of `SHIFTS`.

    Silhouettes in depth are mostly edges in the image; where the calibration holds, no shift finds
    stronger edges.
    """
    total, count = np.zeros(len(SHIFTS)), 0
    for frame in frames:
        for camera in frame.cameras:
            grey = camera.image[..., 1].astype(np.float32)
            contrast = np.zeros_like(grey)
            contrast[:, 1:-1] = np.abs(grey[:, 2:] - grey[:, :-2])
            contrast = np.minimum(contrast, np.percentile(contrast[::4, ::4], 98))
            column, row = silhouettes(camera, frame.points, band, gap, ratio).T
            around = np.array(SHIFTS)[:, None, None] + np.arange(-3, 4)[:, None] + column
            around = np.clip(around, 0, camera.width - 1)
            total += contrast[row, around].max(axis=1).sum(axis=1)
            count += len(column)
    assert count > 300
    return total / count


def assert_sharpest_unmoved(found: np.ndarray, by: float) -> None:
    middle = len(SHIFTS) // 2
    assert np.argmax(found) == middle, found.round(2)
    far = np.r_[found[: middle - 2], found[middle + 3 :]]
    assert found[middle] > by * far.mean(), found.round(2)
