"""Overlaps against shapely and by hand; suppression against a loop."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bev_data import InputError
from bevfusion.model.head import circle_nms, rotated_iou, rotated_nms


def random_boxes(count: int, seed: int, spread: float = 4.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    boxes = np.zeros((count, 7))
    boxes[:, 0] = 40.0 + rng.uniform(-spread, spread, count)
    boxes[:, 1] = rng.uniform(-spread, spread, count) - 30.0
    boxes[:, 3:6] = np.exp(rng.uniform(-1.5, 2.0, (count, 3)))
    boxes[:, 6] = rng.uniform(-7, 7, count)
    return boxes


def corners(box: np.ndarray) -> list[tuple[float, float]]:
    x, y, _, length, width, _, yaw = box
    cos, sin = math.cos(yaw), math.sin(yaw)
    return [
        (
            x + cos * a * length / 2 - sin * b * width / 2,
            y + sin * a * length / 2 + cos * b * width / 2,
        )
        for a, b in ((1, 1), (-1, 1), (-1, -1), (1, -1))
    ]


def test_overlap_matches_shapely() -> None:
    shapely = pytest.importorskip("shapely", reason="shapely is not installed")
    boxes = random_boxes(60, 0)
    shapes = np.array([shapely.Polygon(corners(box)) for box in boxes])
    common = shapely.area(shapely.intersection(shapes[:, None], shapes[None]))
    areas = shapely.area(shapes)
    want = common / (areas[:, None] + areas[None] - common)
    got = rotated_iou(boxes, boxes)
    assert ((want > 0.01) & (want < 0.99)).mean() > 0.1  # enough pairs overlap
    np.testing.assert_allclose(got, want, atol=1e-9)


def test_overlap_matches_counted_points() -> None:
    boxes = random_boxes(8, 1, spread=1.5)
    side = np.linspace(-12.0, 12.0, 1201)
    x, y = (axis.ravel() for axis in np.meshgrid(side + 40.0, side - 30.0))
    inside = []
    for box in boxes:
        dx, dy, cos, sin = x - box[0], y - box[1], math.cos(box[6]), math.sin(box[6])
        along, across = cos * dx + sin * dy, cos * dy - sin * dx
        inside.append((abs(along) < box[3] / 2) & (abs(across) < box[4] / 2))
    for i, first in enumerate(inside):
        for j, second in enumerate(inside):
            want = (first & second).sum() / (first | second).sum()
            assert rotated_iou(boxes[i : i + 1], boxes[j : j + 1])[0, 0] == pytest.approx(
                want, abs=0.02
            )


def test_special_positions() -> None:
    box = [3.0, 4.0, 0, 4.0, 2.0, 1.0, 0.7]

    def moved(along: float, across: float, **changes: float) -> list[float]:
        other = list(box)
        other[0] += along * math.cos(0.7) - across * math.sin(0.7)
        other[1] += along * math.sin(0.7) + across * math.cos(0.7)
        for name, value in changes.items():
            other[{"length": 3, "width": 4, "yaw": 6}[name]] = value
        return other

    cases = {
        1.0: box,
        1.0 - 1e-13: moved(0, 0, yaw=0.7 + math.pi),
        1 / 3: moved(2, 0),
        0.25: moved(0, 0, length=2.0, width=1.0),  # wholly inside
        0.0: moved(4, 0),  # one side in common
        4 / 12: moved(0, 0, yaw=0.7 + math.pi / 2),  # a cross
        1 / 31: moved(3, 1.5, length=4.0, width=2.0),
    }
    for want, other in cases.items():
        assert rotated_iou([box], [other])[0, 0] == pytest.approx(want, abs=1e-9), other
        assert rotated_iou([other], [box])[0, 0] == pytest.approx(want, abs=1e-9), other


def test_a_regular_octagon() -> None:
    square = [0.0, 0, 0, 2, 2, 1, 0]
    area = 8 * (math.sqrt(2) - 1)
    want = area / (8 - area)
    turned = [*square[:6], math.pi / 4]
    assert rotated_iou([square], [turned])[0, 0] == pytest.approx(want, rel=1e-12)


def test_far_from_the_origin_nothing_is_lost() -> None:
    near = np.array([[0.0, 0, 0, 4, 2, 1, 0.2], [0.5, 0.25, 0, 4, 2, 1, 0.25]])
    far = near.copy()
    far[:, 0] += 2.0**20
    far[:, 1] -= 2.0**20
    np.testing.assert_allclose(rotated_iou(far, far), rotated_iou(near, near), atol=1e-12)


def test_boxes_of_no_area_overlap_with_nothing() -> None:
    flat = [[0.0, 0, 0, 4, 0, 1, 0]]
    assert rotated_iou(flat, flat).tolist() == [[0.0]]
    assert rotated_nms(flat * 2, [0.5, 0.6], 0.1).tolist() == [1, 0]


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.3])
def test_nms_leaves_what_a_loop_leaves(threshold: float) -> None:
    boxes = random_boxes(80, 2, spread=5.0)
    scores = np.random.default_rng(3).integers(0, 20, 80) / 20  # with ties
    overlaps = rotated_iou(boxes, boxes)
    left = sorted(range(80), key=lambda row: (-scores[row], row))
    want = []
    while left:
        best = left.pop(0)
        want.append(best)
        left = [row for row in left if overlaps[best, row] <= threshold]
    assert 1 < len(want) < 80
    assert rotated_nms(boxes, scores, threshold).tolist() == want


def test_identical_boxes_leave_one_the_first_of_equal_scores() -> None:
    boxes = np.repeat(random_boxes(1, 4), 5, 0)
    assert rotated_nms(boxes, np.full(5, 0.5), 0.99).tolist() == [0]
    assert circle_nms(boxes[:, :2], [0.1, 0.5, 0.5, 0.2, 0.5], 0.0).tolist() == [1]


def test_circle_nms_measures_metres_not_their_square() -> None:
    centers = [[0.0, 0.0], [0.5, 0.0], [1.2, 0.0]]
    assert circle_nms(centers, [0.9, 0.8, 0.7], 0.5).tolist() == [0, 2]
    assert circle_nms(centers, [0.9, 0.8, 0.7], 0.49).tolist() == [0, 1, 2]
    # The middle one is suppressed and suppresses nobody.
    assert circle_nms([[0.0, 0], [0.4, 0], [0.8, 0]], [0.9, 0.8, 0.7], 0.5).tolist() == [0, 2]


def test_nothing_in_nothing_out() -> None:
    none = np.zeros((0, 7))
    assert rotated_nms(none, [], 0.5).tolist() == []
    assert rotated_nms([], [], 0.5).dtype == np.int64
    assert circle_nms(np.zeros((0, 2)), [], 0.5).tolist() == []
    assert rotated_iou(none, random_boxes(3, 5)).shape == (0, 3)


def test_bad_rows_are_named() -> None:
    boxes = random_boxes(4, 6)
    boxes[1, 6], boxes[3, 4] = np.nan, -1.0
    with pytest.raises(InputError, match=r"rows \[1, 3\].*drop"):
        rotated_nms(boxes, np.zeros(4), 0.5)
    with pytest.raises(InputError, match=r"rows \[2\] are NaN"):
        rotated_nms(random_boxes(3, 6), [0.1, 0.2, np.nan], 0.5)
    with pytest.raises(InputError, match=r"rows \[0\] hold NaN"):
        circle_nms([[np.inf, 0.0]], [0.5], 1.0)
    with pytest.raises(InputError, match="as many scores"):
        circle_nms([[0.0, 0.0]], [0.5, 0.6], 1.0)
    with pytest.raises(InputError, match=r"\[n, 7\]"):
        rotated_iou(np.zeros((2, 5)), boxes)
