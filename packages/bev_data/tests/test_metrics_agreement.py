"""Matched detections and found labels, against counts made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bev_data.boxes import Detections
from bev_data.metrics import AgreementAccumulator, match
from bev_data.points import Labels

CLASSES = ("car", "truck")
EXTENT = (-50.0, -50.0, 50.0, 50.0)


def detections(*rows: tuple[float, float, float, int]) -> Detections:
    """Boxes at x, y with a score and a class."""
    boxes = np.ones((len(rows), 7), np.float32)
    for box, row in zip(boxes, rows, strict=True):
        box[:2] = row[:2]
    return Detections(
        boxes,
        np.array([row[2] for row in rows], np.float32),
        np.array([row[3] for row in rows], np.int64),
        np.zeros((len(rows), 2), np.float32),
    )


def labels(*rows: tuple[float, float, str], points: list[int] | None = None) -> Labels:
    boxes = np.ones((len(rows), 7), np.float32)
    for box, row in zip(boxes, rows, strict=True):
        box[:2] = row[:2]
    counts = None if points is None else np.array(points, np.int32)
    return Labels(boxes, tuple(row[2] for row in rows), num_points=counts)


def test_matches_are_one_to_one_of_one_class_and_the_limit_counts() -> None:
    here = np.array([[0.0, 0], [0.0, 0], [10, 0], [20, 0]])
    there = np.array([[1.0, 0], [10.0, 0.5], [22.0, 0]])
    pairs = match(here, ["car", "car", "car", "car"], there, ["car", "truck", "car"], 1.0)
    assert pairs == [(0, 0)]
    assert match(here, [0, 0, 0, 0], there, [0, 0, 0], 2.0) == [(0, 0), (2, 1), (3, 2)]
    assert match(here[:0], [], there, [0, 0, 0], 2.0) == []
    assert match(here, [0] * 4, there[:0], [], 2.0) == []


def test_agreement_counts_by_distance_and_compares_scores() -> None:
    accumulator = AgreementAccumulator(CLASSES, EXTENT)
    wanted = detections((0, 0, 0.9, 0), (5, 0, 0.8, 1))
    got = detections((0.3, 0, 0.7, 0), (5, 1.5, 0.75, 1), (9, 9, 0.1, 1))
    accumulator.add(wanted, got, None)
    accumulator.add(detections(), detections((0, 0, 0.5, 0)), None)
    near, middle, far = accumulator.agreement()
    assert [row.distance for row in (near, middle, far)] == [0.5, 1.0, 2.0]
    assert [row.matched for row in (near, middle, far)] == [1, 1, 2]
    assert (far.float_detections, far.quantized_detections) == (2, 4)
    assert near.score_mean == pytest.approx(0.2, abs=1e-6)
    assert far.score_mean == pytest.approx((0.2 + 0.05) / 2, abs=1e-6)
    assert far.score_max == pytest.approx(0.2, abs=1e-6)
    assert accumulator.found() == []


def test_nothing_matched_has_no_score_difference() -> None:
    accumulator = AgreementAccumulator(CLASSES, EXTENT)
    accumulator.add(detections(), detections(), None)
    assert {(r.matched, r.score_mean, r.score_max) for r in accumulator.agreement()} == {
        (0, None, None)
    }


def test_labels_found_leave_out_what_cannot_be_found() -> None:
    accumulator = AgreementAccumulator(CLASSES, EXTENT)
    truth = labels(
        (0, 0, "car"), (3, 0, "car"), (60, 0, "car"), (0, 5, "dog"), (9, 9, "truck"),
        points=[4, 1, 9, 9, 0],
    )  # fmt: skip
    accumulator.add(
        detections((0, 0.8, 0.9, 0), (3, 0, 0.2, 1)), detections((3.1, 0, 0.4, 0)), truth
    )
    rows = accumulator.found()
    assert {row.labels for row in rows} == {2}  # not the far one, the dog, the empty one
    assert [row.found_float for row in rows] == [0, 1, 1]
    assert [row.found_quantized for row in rows] == [1, 1, 1]
