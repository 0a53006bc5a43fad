"""Detection metrics in cases whose answer is known, and in those that break naive code."""

from __future__ import annotations

import numpy as np
import pytest
from metric_scenes import detections, labels, random_frames

from bev_data import InputError
from bev_data.boxes import NUSCENES_CLASSES, Detections
from bev_data.metrics import DetectionAccumulator, DetectionRules, evaluate_detections, metrics_of
from bev_data.points import Labels

NOTHING = detections()
EMPTY = labels()


def perfect(there: list[Labels], score: float = 0.5) -> list[Detections]:
    return [
        Detections(
            truth.boxes.copy(),
            np.full(len(truth.names), score, np.float32),
            np.array([NUSCENES_CLASSES.index(name) for name in truth.names], np.int64),
            np.nan_to_num(truth.velocities),
        )
        for truth in there
    ]


def test_perfect_detections_give_one_and_no_errors() -> None:
    _, there = random_frames(1, 20)
    got = evaluate_detections(perfect(there), there)
    assert got.mean_ap == 1.0
    assert set(got.average_precision.values()) == {1.0}
    assert set(got.bev_ap.values()) == {1.0}
    assert got.nds == 1.0
    assert max(got.errors.values()) < 1e-6
    assert got.absent == ()


@pytest.mark.parametrize("shift", [0.25, 0.75, 1.5, 3.0])
def test_shifted_boxes_have_that_error_and_miss_the_limits_below(shift: float) -> None:
    places = [(6.0 * k - 20, 3.0 * k, "car") for k in range(7)]
    there = labels(*places)
    found = detections(*((x, y + shift, name, 0.9 - 0.1 * k) for k, (x, y, name) in
                         enumerate(places)))  # fmt: skip
    got = evaluate_detections([found], [there])
    assert got.average_precision == {d: float(shift < d) for d in (0.5, 1.0, 2.0, 4.0)}
    assert got.errors["ATE"] == pytest.approx(shift if shift < 2 else 1.0, abs=1e-6)
    assert got.errors["ASE"] == pytest.approx(0 if shift < 2 else 1, abs=1e-6)


def test_a_centre_exactly_at_the_limit_is_no_hit() -> None:
    got = evaluate_detections([detections((2.0, 0, "car", 0.9))], [labels((0.0, 0, "car"))])
    assert got.average_precision == {0.5: 0.0, 1.0: 0.0, 2.0: 0.0, 4.0: 1.0}


def test_errors_of_size_yaw_and_speed_are_the_analytic_ones() -> None:
    there = labels((3, 4, "car", 0.1), (9, 4, "barrier", 0.0), velocities=[(1, 2), (0, 0)])
    found = detections((3, 4, "car", 0.9, 0.1 - 0.4), (9, 4, "barrier", 0.8, np.pi - 0.3))
    found.boxes[0, 3] *= 2
    found = found._replace(velocities=np.array([(4, 6), (9, 9)], np.float32))
    got = {row.name: row.errors for row in evaluate_detections([found], [there]).classes}
    assert got["car"] == pytest.approx({"ATE": 0, "ASE": 0.5, "AOE": 0.4, "AVE": 5}, abs=1e-6)
    assert got["barrier"]["AOE"] == pytest.approx(0.3, abs=1e-6)  # to half a turn alone
    assert got["barrier"]["AVE"] is None


def test_nothing_found_and_nothing_there() -> None:
    there = labels((0, 5, "car"), (5, 5, "bus"))
    got = evaluate_detections([NOTHING], [there])
    assert (got.mean_ap, got.nds) == (0.0, 0.0)
    assert got.errors == {"ATE": 1.0, "ASE": 1.0, "AOE": 1.0, "AVE": None}
    assert set(got.bev_ap.values()) == {0.0}

    got = evaluate_detections([detections((0, 5, "car", 0.5))], [EMPTY])
    assert (got.mean_ap, got.nds, got.labels, got.frames) == (None, None, 0, 1)
    assert set(got.errors.values()) == {None}
    assert got.absent == NUSCENES_CLASSES

    got = evaluate_detections([], [])
    assert (got.mean_ap, got.frames) == (None, 0)


def test_a_false_alarm_in_a_frame_without_labels_costs_precision() -> None:
    there, found = labels((0, 5, "car")), detections((0, 5, "car", 0.5))
    alone = evaluate_detections([found], [there]).mean_ap
    alarm = evaluate_detections([found, detections((9, 9, "car", 0.9))], [there, EMPTY]).mean_ap
    assert alone == 1.0
    # Recall 1 at half precision: a straight line from 0 to a half, of which the part above 0.1 …
    recalls = np.linspace(0, 1, 101)[11:]
    assert alarm == pytest.approx(np.maximum(0.5 * recalls - 0.1, 0).mean() / 0.9)


def test_a_class_without_labels_is_left_out_or_counts_zero() -> None:
    there, found = labels((0, 5, "car")), detections((0, 5, "car", 0.5), (3, 3, "bus", 0.9))
    got = evaluate_detections([found], [there])
    assert got.mean_ap == 1.0
    assert "bus" in got.absent
    bus = next(row for row in got.classes if row.name == "bus")
    assert (bus.mean_ap, bus.detections, bus.labels) == (None, 1, 0)
    assert set(bus.errors.values()) == {None}
    zero = evaluate_detections([found], [there], rules=DetectionRules(absent="zero"))
    assert zero.mean_ap == pytest.approx(0.1)
    assert zero.errors["ATE"] == pytest.approx(0.9)


def test_duplicates_take_one_label_once() -> None:
    there = labels((0, 5, "car"), (20, 5, "car"))
    once = detections((0, 5, "car", 0.9), (20, 5, "car", 0.8))
    twice = detections((0, 5, "car", 0.9), (0, 5, "car", 0.9), (20, 5, "car", 0.8))
    assert evaluate_detections([once], [there]).mean_ap == 1.0
    got = evaluate_detections([twice], [there])
    assert got.mean_ap < 1.0
    # Two hits in three; beyond recall 1/2 precision rises on a line from 1/2 to 2/3.
    recalls = np.linspace(0, 1, 101)[11:]
    curve = np.where(recalls < 0.5, 1.0, 0.5 + (recalls - 0.5) / 0.5 * (2 / 3 - 1 / 2))
    assert got.average_precision[0.5] == pytest.approx(((curve - 0.1) / 0.9).mean())


def test_of_equal_scores_the_later_comes_first() -> None:
    there = labels((0, 5, "car"))
    near, far = (0.2, 5, "car", 0.5), (1.4, 5, "car", 0.5)
    first = evaluate_detections([detections(far, near)], [there])
    second = evaluate_detections([detections(near, far)], [there])
    assert first.errors["ATE"] == pytest.approx(0.2, abs=1e-6)
    assert second.errors["ATE"] == pytest.approx(1.4, abs=1e-6)
    # At recall 1 the miss that follows counts: the last of 90 recalls has precision 1/2.
    assert first.average_precision[0.5] == pytest.approx((89 + (0.5 - 0.1) / 0.9) / 90)
    assert second.average_precision[0.5] < 0.5


def test_the_best_score_chooses_first_and_takes_the_nearest() -> None:
    there = labels((0, 5, "car"), (1, 5, "car"))
    found = detections((0.45, 5, "car", 0.4), (0.1, 5, "car", 0.9))
    got = evaluate_detections([found], [there])
    assert got.average_precision[1.0] == 1.0
    assert got.errors["ATE"] == pytest.approx(_mean_of_two(), abs=1e-6)


def _mean_of_two() -> float:
    """0.1 down to recall 1/2, the mean of 0.1 and 0.55 at recall 1; between, a line by score."""
    scores = np.interp(np.linspace(0, 1, 101), [0.5, 1.0], [0.9, 0.4])[11:]
    return float(np.interp(scores[::-1], [0.4, 0.9], [(0.1 + 0.55) / 2, 0.1]).mean())


def test_of_equally_near_labels_the_first_is_taken() -> None:
    found = detections((0, 5, "car", 0.5))
    for turns, wanted in (((0.0, 0.7), 0.0), ((0.7, 0.0), 0.7)):
        there = labels((-1, 5, "car", turns[0]), (1, 5, "car", turns[1]))
        accumulator = DetectionAccumulator(NUSCENES_CLASSES, DetectionRules(min_recall=0.0))
        accumulator.add(found, there)
        assert metrics_of(accumulator).errors["AOE"] == pytest.approx(wanted, abs=1e-6)


def test_far_boxes_and_labels_without_points_do_not_count() -> None:
    there = labels(
        (0, 49.9, "car"), (0, 50, "car"), (39, 0, "pedestrian"), (41, 0, "pedestrian"),
        (5, 5, "car"), (6, 6, "dog"),
        points=[1, 9, 1, 9, 0, 9],
    )  # fmt: skip
    got = evaluate_detections(
        [detections((0, 50, "car", 0.9), (45, 0, "pedestrian", 1.0))], [there]
    )
    counts = {row.name: (row.labels, row.detections) for row in got.classes if row.labels}
    assert counts == {"car": (1, 0), "pedestrian": (1, 0)}
    narrow = DetectionRules(extent=(-40, -40, 40, 40))
    assert evaluate_detections([NOTHING], [there], rules=narrow).labels == 1


def test_ranges_are_measured_from_where_the_rules_say() -> None:
    there = labels((0, 49.5, "car"), (0, -50.5, "car"))
    found = detections((0, 49.5, "car", 0.9), (0, -50.5, "car", 0.8))
    counted = {}
    for origin in ((0.0, 0.0), (0.0, -0.94)):
        got = evaluate_detections([found], [there], rules=DetectionRules(origin=origin))
        counted[origin] = (got.labels, got.classes[0].detections, got.errors["ATE"])
    assert counted == {(0.0, 0.0): (1, 1, 0.0), (0.0, -0.94): (1, 1, 0.0)}
    near = DetectionRules(origin=(0.0, 0.94))
    assert evaluate_detections([found], [there], rules=near).labels == 1
    middle = DetectionRules(origin=(0.0, -0.5), class_ranges={"car": 50.1})
    assert evaluate_detections([found], [there], rules=middle).labels == 2


def test_what_stands_in_a_bicycle_rack_does_not_count() -> None:
    rack = labels((0, 5, "static_object.bicycle_rack"), (0.5, 5, "bicycle"), (9, 5, "bicycle"))
    found = detections((0.5, 5.2, "bicycle", 0.9), (9, 5, "bicycle", 0.8), (0, 5, "car", 0.5))
    rows = {row.name: row for row in evaluate_detections([found], [rack]).classes}
    assert (rows["bicycle"].labels, rows["bicycle"].detections) == (1, 1)
    assert rows["bicycle"].mean_ap == 1.0
    assert rows["car"].detections == 1


def test_only_the_labelled_region_counts() -> None:
    accumulator = DetectionAccumulator(NUSCENES_CLASSES)
    there = labels((0, 5, "car"), (0, -5, "car"))
    found = detections((0, 5, "car", 0.5), (9, -9, "car", 0.9))
    accumulator.add(found, there, region=lambda boxes: boxes[:, 1] > 0)
    assert metrics_of(accumulator).mean_ap == 1.0
    assert accumulator.labels == 1


@pytest.mark.parametrize("field", ["boxes", "scores", "velocities"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_is_refused_and_named(field: str, value: float) -> None:
    there = labels((0, 5, "car"))
    found = detections((1, 5, "car", 0.5), (2, 5, "car", 0.4))
    getattr(found, field)[1] = value
    with pytest.raises(InputError, match=rf"frame 1: detections\.{field}: 1 of 2 rows .* row 1"):
        evaluate_detections([NOTHING, found], [there, there])


def test_what_does_not_fit_is_refused() -> None:
    there, found = labels((0, 5, "car")), detections((1, 5, "car", 0.5))
    with pytest.raises(InputError, match="1 frames of detections, 2 of labels"):
        evaluate_detections([found], [there, there])
    with pytest.raises(InputError, match="3 scene names"):
        evaluate_detections([found], [there], scenes=["a", "b", "c"])
    with pytest.raises(InputError, match=r"labels go up to 7, but there are 10|classes"):
        evaluate_detections([found._replace(labels=np.array([10]))], [there])
    with pytest.raises(InputError, match=r"class numbers from 0"):
        evaluate_detections([found._replace(labels=np.array([-1]))], [there])
    with pytest.raises(InputError, match=r"detections\.scores must be \[1\], not \[2\]"):
        evaluate_detections([found._replace(scores=np.ones(2))], [there])
    small = found.boxes.copy()
    small[0, 4] = -1
    with pytest.raises(InputError, match="row 0 has a negative size"):
        evaluate_detections([found._replace(boxes=small)], [there])
    broken = there._replace(boxes=there.boxes * np.nan)
    with pytest.raises(InputError, match=r"frame 0: labels\.boxes"):
        evaluate_detections([found], [broken])
    with pytest.raises(InputError, match="a name of its own"):
        DetectionAccumulator(("car", "car"))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("distances", (0.0, 2.0)), ("distances", (2.0, 2.0)), ("error_distance", 3.0),
        ("min_recall", 1.0), ("min_precision", -0.1), ("overlaps", (1.0,)), ("absent", "never"),
        ("class_ranges", {"car": -1.0}),
    ],
)  # fmt: skip
def test_rules_out_of_range_are_refused(setting: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"DetectionRules\.{setting} must be"):
        DetectionRules(**{setting: value})


def test_a_box_without_a_size_is_judged_not_a_crash() -> None:
    found = detections((0, 5, "car", 0.5))
    found.boxes[0, 3:6] = 0
    got = evaluate_detections([found], [labels((0, 5, "car"))])
    assert got.mean_ap == 1.0
    assert got.errors["ASE"] == 1.0
    assert set(got.bev_ap.values()) == {0.0}


def test_the_order_of_frames_and_rows_does_not_matter_without_ties() -> None:
    found, there = random_frames(3, 20)
    whole = evaluate_detections(found, there)
    random = np.random.default_rng(0)
    frames = random.permutation(20)
    mixed = []
    for index in frames:
        rows = random.permutation(len(found[index].scores))
        mixed.append(Detections(*(column[rows] for column in found[index])))
    other = evaluate_detections(mixed, [there[index] for index in frames])
    for one, two in zip(whole.classes, other.classes, strict=True):
        assert two.average_precision == pytest.approx(one.average_precision, abs=1e-12)
        assert two.bev_ap == pytest.approx(one.bev_ap, abs=1e-12)
        assert two.errors == pytest.approx(one.errors, abs=1e-12)


def test_what_is_kept_does_not_grow_with_the_boxes() -> None:
    """1,000 frames of 200 detections take some 20 bytes each, not the boxes' 100."""
    accumulator = DetectionAccumulator(NUSCENES_CLASSES)
    random = np.random.default_rng(0)
    boxes = np.ones((200, 7), np.float32)
    boxes[:, :2] = random.uniform(-20, 20, (200, 2))
    found = Detections(boxes, random.random(200), random.integers(0, 10, 200), np.zeros((200, 2)))
    for _ in range(50):
        accumulator.add(found, EMPTY)
    kept = sum(
        value.nbytes
        for frame in accumulator._kept
        for value in frame
        if isinstance(value, np.ndarray)
    )
    assert kept / 50 / 200 < 20
