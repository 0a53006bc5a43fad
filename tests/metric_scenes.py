"""Random scenes for the tests of the metrics: labels, and detections that half fit them."""

from __future__ import annotations

import numpy as np

from bev_data.boxes import NUSCENES_CLASSES, Detections
from bev_data.points import Labels

__all__ = ["detections", "labels", "random_frames"]

SIZE = (4.5, 1.9, 1.6)


def labels(*rows: tuple, velocities: object = None, points: object = None) -> Labels:
    """Boxes (x, y, name) or (x, y, name, yaw)."""
    boxes = np.array([[x, y, -1, *SIZE, *(yaw or (0,))] for x, y, _, *yaw in rows], np.float32)
    names = tuple(row[2] for row in rows)
    known = None if velocities is None else np.array(velocities, np.float32)
    counts = None if points is None else np.array(points, np.int32)
    return Labels(boxes.reshape(-1, 7), names, known, None, counts)


def detections(*rows: tuple, classes: tuple[str, ...] = NUSCENES_CLASSES) -> Detections:
    """Boxes (x, y, name, score) or (x, y, name, score, yaw)."""
    boxes = np.array([[x, y, -1, *SIZE, *(yaw or (0,))] for x, y, _, _, *yaw in rows], np.float32)
    return Detections(
        boxes.reshape(-1, 7),
        np.array([row[3] for row in rows], np.float32),
        np.array([classes.index(row[2]) for row in rows], np.int64),
        np.zeros((len(rows), 2), np.float32),
    )


def random_frames(
    seed: int,
    count: int = 12,
    *,
    classes: tuple[str, ...] = NUSCENES_CLASSES,
    ties: bool = False,
    reach: float = 35.0,
) -> tuple[list[Detections], list[Labels]]:
    """Frames with labels, detections near most of them, some far off, some twice, some wrong."""
    random = np.random.default_rng(seed)
    found, there = [], []
    for _ in range(count):
        n = int(random.integers(0, 14))
        boxes = np.concatenate(
            [
                random.uniform(-reach, reach, (n, 2)),
                random.uniform(-2, 0, (n, 1)),
                random.uniform(0.5, 5, (n, 3)),
                random.uniform(-np.pi, np.pi, (n, 1)),
            ],
            axis=1,
        )
        kinds = random.integers(0, len(classes), n)
        speed = random.normal(0, 3, (n, 2))
        known = speed.astype(np.float32)
        known[random.random(n) < 0.2] = np.nan
        names = tuple(classes[kind] for kind in kinds)
        there.append(Labels(boxes.astype(np.float32), names, known))
        rows = random.integers(0, n, 2 * n) if n else np.zeros(0, np.int64)
        guess = boxes[rows] + random.normal(0, [1, 1, 1, 0, 0, 0, 0.5], (len(rows), 7))
        guess[:, 3:6] *= random.uniform(0.7, 1.4, (len(rows), 3))
        wrong = random.random(len(rows)) < 0.2
        guess[wrong, :2] = random.uniform(-reach, reach, (int(wrong.sum()), 2))
        scores = random.random(len(rows))
        kind = np.where(random.random(len(rows)) < 0.9, kinds[rows], 0)
        found.append(
            Detections(
                guess.astype(np.float32),
                (np.round(scores, 1) if ties else scores).astype(np.float32),
                kind.astype(np.int64),
                (speed[rows] + random.normal(0, 1, (len(rows), 2))).astype(np.float32),
            )
        )
    return found, there
