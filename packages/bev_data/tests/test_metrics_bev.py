"""KITTI's average precision over 40 recalls, against loops and shapely's polygons."""

from __future__ import annotations

import numpy as np
import pytest
from metric_scenes import detections, labels, random_frames

from bev_data.boxes import NUSCENES_CLASSES, Detections
from bev_data.metrics import DetectionRules, evaluate_detections
from bev_data.points import Labels

geometry = pytest.importorskip("shapely.geometry", reason="shapely is not installed")


def polygon(box: np.ndarray) -> object:
    x, y, _, length, width, _, yaw = map(float, box)
    c, s = np.cos(yaw), np.sin(yaw)
    corners = [(length / 2 * a, width / 2 * b) for a, b in ((1, 1), (-1, 1), (-1, -1), (1, -1))]
    return geometry.Polygon([(x + u * c - v * s, y + u * s + v * c) for u, v in corners])


def overlap(a: object, b: object) -> float:
    common = a.intersection(b).area
    return common / (a.area + b.area - common)


def by_hand(found: list[Detections], there: list[Labels], name: str, least: float) -> float:
    """Walk through all detections of a class, best first, and read precision at k / 40."""
    rows = [
        (float(seen.scores[i]), frame, polygon(seen.boxes[i]))
        for frame, seen in enumerate(found)
        for i in range(len(seen.scores))
        if NUSCENES_CLASSES[seen.labels[i]] == name
    ]
    truth = [
        [polygon(box) for box, n in zip(real.boxes, real.names, strict=True) if n == name]
        for real in there
    ]
    free = [[True] * len(boxes) for boxes in truth]
    total = sum(map(len, truth))
    points, right = [], 0
    for seen, (_, frame, shape) in enumerate(sorted(rows, key=lambda r: -r[0]), 1):
        best = max(
            (k for k in range(len(truth[frame])) if free[frame][k]),
            key=lambda k: overlap(shape, truth[frame][k]),
            default=None,
        )
        if best is not None and overlap(shape, truth[frame][best]) > least:
            free[frame][best] = False
            right += 1
        points.append((right / total, right / seen))
    at = [max((p for r, p in points if r >= k / 40 - 1e-12), default=0.0) for k in range(1, 41)]
    return sum(at) / 40


@pytest.mark.parametrize("seed", range(3))
def test_bev_ap_is_that_of_a_loop_over_polygons(seed: int) -> None:
    found, there = random_frames(seed, 15, classes=("car", "truck"), reach=25)
    rules = DetectionRules(overlaps=(0.2, 0.5, 0.7))
    got = evaluate_detections(found, there, rules=rules)
    assert got.bev_ap[0.2] > 0.02
    for row in got.classes[:2]:
        for least, ap in row.bev_ap.items():
            assert ap == pytest.approx(by_hand(found, there, row.name, least), abs=1e-12)
    assert got.bev_ap[0.5] == pytest.approx(np.mean([r.bev_ap[0.5] for r in got.classes[:2]]))


def test_the_mean_of_40_recalls_counts_the_one_that_is_reached() -> None:
    there = labels(*((6.0 * k - 15, 0, "car") for k in range(4)))
    found = detections((-15, 0, "car", 0.9), (-9, 0, "car", 0.8))
    got = evaluate_detections([found], [there])
    assert got.bev_ap == {0.5: 0.5, 0.7: 0.5}  # 20 of 40 recalls, at precision 1


def test_turned_boxes_overlap_less_than_their_centres_say() -> None:
    there = labels((0, 10, "car"))
    found = detections((0, 10, "car", 0.9, np.pi / 2))
    got = evaluate_detections([found], [there])
    assert got.mean_ap == 1.0
    assert got.bev_ap == {0.5: 0.0, 0.7: 0.0}
