"""Bootstrap intervals, against draws that are written out frame by frame."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from metric_scenes import detections, labels, random_frames

from bev_data import InputError
from bev_data.boxes import NUSCENES_CLASSES, Detections
from bev_data.metrics import (
    Bootstrap,
    DetectionAccumulator,
    DetectionRules,
    compare_detections,
    evaluate_detections,
    interval_of_difference,
    interval_of_mean_ap,
    metrics_of,
)
from bev_data.points import Labels

FEW = Bootstrap(resamples=200)


def meter_of(
    found: list[Detections], there: list[Labels], scenes: list[str] | None = None,
    rules: DetectionRules | None = None,
) -> DetectionAccumulator:  # fmt: skip
    accumulator = DetectionAccumulator(NUSCENES_CLASSES, rules)
    for index, (seen, real) in enumerate(zip(found, there, strict=True)):
        accumulator.add(seen, real, scene=None if scenes is None else scenes[index])
    return accumulator


def drawn(seed: int, scenes: int) -> np.ndarray:
    """How many times each scene is in the first draw of a seed."""
    shares = np.full(scenes, 1 / scenes)
    times: np.ndarray = np.random.default_rng(seed).multinomial(scenes, shares, size=1)[0]
    return times


def only_draw(accumulator: DetectionAccumulator, seed: int) -> tuple[np.ndarray, float]:
    """A draw, and the metric on it: the interval of no other."""
    interval = interval_of_mean_ap(accumulator, Bootstrap(resamples=1, seed=seed))
    assert interval is not None
    assert interval.low == interval.high
    return drawn(seed, len(accumulator.scenes)), interval.low


@pytest.mark.parametrize("absent", ["left out", "zero"])
def test_a_draw_is_the_metric_of_the_frames_written_out(absent: str) -> None:
    """A class that a draw has no labels of keeps its figure."""
    found, there = random_frames(2, 14, classes=NUSCENES_CLASSES[:8])
    found[0], there[0] = detections((0, 9.3, "pedestrian", 0.7)), labels((0, 9, "pedestrian"))
    scenes = [f"scene {index // 2}" for index in range(14)]
    rules = DetectionRules(absent=absent)
    accumulator = meter_of(found, there, scenes, rules)
    whole = [row.mean_ap for row in metrics_of(accumulator).classes]
    kept = 0
    for seed in range(12):
        draw, value = only_draw(accumulator, seed)
        rows = [i for i in range(14) for _ in range(draw[i // 2])]
        wanted = evaluate_detections(
            [found[i] for i in rows], [there[i] for i in rows], rules=rules
        )
        aps = [row.mean_ap if row.labels else whole[k] for k, row in enumerate(wanted.classes)]
        kept += sum(not row.labels for row in wanted.classes[:9])
        assert value == pytest.approx(np.mean([ap for ap in aps if ap is not None]), abs=1e-12)
    assert kept > 0
    assert whole[9] == (None if absent == "left out" else 0.0)


def test_every_scene_once_is_the_metric_itself() -> None:
    for number in range(4):
        found, there = random_frames(number, 4, ties=True)
        accumulator = meter_of(found, there)
        once = next(s for s in itertools.count() if (drawn(s, 4) == 1).all())
        assert only_draw(accumulator, once)[1] == pytest.approx(
            metrics_of(accumulator).mean_ap, abs=1e-12
        )


def test_the_interval_holds_the_metric_and_narrows_with_scenes() -> None:
    widths = []
    for count in (10, 160):
        found, there = random_frames(4, count, classes=("car", "truck"))
        got = evaluate_detections(found, there, bootstrap=FEW)
        assert got.interval.low < got.mean_ap < got.interval.high
        assert (got.interval.level, got.interval.scenes) == (0.95, count)
        widths.append(got.interval.high - got.interval.low)
    assert widths[1] < widths[0] / 2  # four times, as the square root of 16 would have it


def test_the_same_seed_gives_the_same_interval_and_another_one_another() -> None:
    found, there = random_frames(6, 12)
    first, again, other = (
        evaluate_detections(found, there, bootstrap=Bootstrap(100, seed=seed)).interval
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    wider = evaluate_detections(found, there, bootstrap=Bootstrap(100, 1, 0.99)).interval
    assert wider.low <= first.low < first.high <= wider.high


def test_frames_of_a_scene_are_drawn_together() -> None:
    """Ten copies of one frame in a scene say no more than the frame."""
    found, there = random_frames(8, 6, classes=("car",))
    alone = interval_of_mean_ap(meter_of(found, there), FEW)
    scenes = [f"{index % 6}" for index in range(60)]
    copied = interval_of_mean_ap(meter_of(found * 10, there * 10, scenes), FEW)
    apart = interval_of_mean_ap(meter_of(found * 10, there * 10), FEW)
    assert copied.scenes == 6
    assert copied.high - copied.low > 0.7 * (alone.high - alone.low)
    assert apart.high - apart.low < 0.6 * (alone.high - alone.low)


def test_a_model_against_itself_differs_by_nothing() -> None:
    found, there = random_frames(9, 12)
    got = compare_detections(found, found, there, bootstrap=FEW)
    assert got.mean_ap == 0.0
    assert (got.interval.low, got.interval.high) == (0.0, 0.0)


def test_the_paired_interval_is_narrower_than_that_of_either() -> None:
    found, there = random_frames(10, 30, classes=("car", "truck"))
    random = np.random.default_rng(0)
    moved = [
        d._replace(boxes=d.boxes + random.normal(0, 0.05, d.boxes.shape).astype(np.float32)
                   * np.float32([1, 1, 0, 0, 0, 0, 0]))
        for d in found
    ]  # fmt: skip
    one = evaluate_detections(found, there, bootstrap=FEW).interval
    other = evaluate_detections(moved, there, bootstrap=FEW)
    paired = compare_detections(moved, found, there, bootstrap=FEW)
    assert paired.mean_ap == pytest.approx(
        other.mean_ap - evaluate_detections(found, there).mean_ap
    )
    assert paired.interval.high - paired.interval.low < 0.5 * (one.high - one.low)
    assert paired.interval.low <= paired.mean_ap <= paired.interval.high


def test_a_model_that_is_worse_everywhere_is_told_apart() -> None:
    found, there = random_frames(11, 40, classes=("car",))
    worse = [d._replace(boxes=d.boxes + np.float32([0.9, 0, 0, 0, 0, 0, 0])) for d in found]
    assert compare_detections(worse, found, there, bootstrap=FEW).interval.high < 0


def test_there_is_no_interval_of_too_little() -> None:
    found, there = detections((0, 5, "car", 0.5)), labels((0, 5, "car"))
    assert evaluate_detections([found], [there], bootstrap=FEW).interval is None
    nothing = [labels(), labels()]
    assert evaluate_detections([found] * 2, nothing, bootstrap=FEW).interval is None
    assert evaluate_detections([], [], bootstrap=FEW).interval is None
    assert evaluate_detections([found] * 2, [there] * 2, bootstrap=Bootstrap(0)).interval is None
    # Draws without the one frame that has labels say nothing, the others all say 1.
    rare = evaluate_detections([found, detections()], [there, labels()], bootstrap=FEW)
    assert (rare.interval.low, rare.interval.high) == (1.0, 1.0)


def test_what_cannot_be_compared_is_refused() -> None:
    found, there = random_frames(1, 4)
    accumulator = meter_of(found, there)
    with pytest.raises(InputError, match="same scenes in the same order"):
        interval_of_difference(accumulator, meter_of(found[:3], there[:3]), FEW)
    with pytest.raises(InputError, match="same rules"):
        interval_of_difference(
            accumulator, meter_of(found, there, rules=DetectionRules(min_points=2)), FEW
        )
    with pytest.raises(InputError, match="must not be negative"):
        Bootstrap(resamples=-1)
