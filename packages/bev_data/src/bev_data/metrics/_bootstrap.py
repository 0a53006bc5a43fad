"""How far mean average precision would move with other scenes of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError
from bev_data.metrics._curve import RECALLS, first_recall

if TYPE_CHECKING:
    from bev_data.metrics._accumulator import ClassRecord, DetectionAccumulator
    from bev_data.metrics._rules import DetectionRules

Floats = npt.NDArray[np.float64]
PIECE = 64  # draws that are held at a time


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are found.

    Attributes:
        resamples: How many times as many scenes as there are, are drawn with replacement; 0 for
            no intervals.
        seed: Of the draws. The same seed and number of scenes draw the same scenes, for every
            model, so that differences are paired.
        level: Share of the resamples inside the interval, the rest half below and half above.
    """

    resamples: int = 1000
    seed: int = 0
    level: float = 0.95

    def __post_init__(self) -> None:
        if self.resamples < 0 or self.seed < 0 or not 0 < self.level < 1:
            raise InputError(
                f"{self}: resamples and seed must not be negative, the level between 0 and 1"
            )


@dataclass(frozen=True)
class Interval:
    """A percentile interval: from `low` to `high` with probability `level` over `scenes` drawn."""

    low: float
    high: float
    level: float
    scenes: int


def interval_of_mean_ap(accumulator: DetectionAccumulator, bootstrap: Bootstrap) -> Interval | None:
    """Interval of one model's mean average precision; None for fewer than two scenes or no labels.

    Efron's percentile interval: scenes are drawn with replacement, with all of their frames, and
    the metric is computed on each draw; a scene drawn twice counts as two scenes. A class with
    labels, but none in a draw, keeps its average precision over all scenes in that draw. Leaving it
    out would shift the mean by its distance from the other classes.
    """
    return _interval(drawn_mean_ap(accumulator, bootstrap), len(accumulator.scenes), bootstrap)


def interval_of_difference(
    model: DetectionAccumulator, reference: DetectionAccumulator, bootstrap: Bootstrap
) -> Interval | None:
    """Of `model`'s mean average precision less `reference`'s, on the same draws for both.

    Raises:
        InputError: The two have not seen the same scenes, or judge by other rules.
    """
    if model.scenes != reference.scenes or model.frames != reference.frames:
        raise InputError(
            "the difference of two models needs both on the same scenes in the same order: "
            f"{len(model.scenes)} scenes, {model.frames} frames against {len(reference.scenes)}, "
            f"{reference.frames}"
        )
    if model.rules != reference.rules or model.classes != reference.classes:
        raise InputError("the difference of two models needs the same rules and classes for both")
    apart = drawn_mean_ap(model, bootstrap) - drawn_mean_ap(reference, bootstrap)
    return _interval(apart, len(model.scenes), bootstrap)


def _interval(values: Floats, scenes: int, bootstrap: Bootstrap) -> Interval | None:
    known = values[~np.isnan(values)]
    if scenes < 2 or not len(known):
        return None
    outside = 50 * (1 - bootstrap.level)
    low, high = np.percentile(known, [outside, 100 - outside])
    return Interval(float(low), float(high), bootstrap.level, scenes)


def drawn_mean_ap(accumulator: DetectionAccumulator, bootstrap: Bootstrap) -> Floats:
    """Mean average precision of every draw of scenes.

    The means of several models' values, draw by draw, give the interval of their mean: all have
    drawn the same scenes.

    Returns:
        float64 [resamples]; NaN for a draw without labels, empty for fewer than two scenes.
    """
    scenes, records = len(accumulator.scenes), accumulator.records()
    if scenes < 2:
        return np.zeros(0)
    random = np.random.default_rng(bootstrap.seed)
    pieces = []
    for start in range(0, bootstrap.resamples, PIECE):
        count = min(PIECE, bootstrap.resamples - start)
        times = random.multinomial(scenes, np.full(scenes, 1 / scenes), size=count)
        pieces.append(mean_aps(records, times, accumulator.rules))
    return np.concatenate([np.zeros(0), *pieces])


def mean_aps(
    records: Sequence[ClassRecord], times: npt.NDArray[np.int64], rules: DetectionRules
) -> Floats:
    """Mean average precision of each draw.

    Args:
        records: By class.
        times: int64 [draws, scenes], how many times each scene is in it.
        rules: How precision is averaged.

    Returns:
        float64 [draws]; NaN for draws without any label.
    """
    total, classes, labels = np.zeros(len(times)), 0, np.zeros(len(times), np.int64)
    for record in records:
        there = times @ record.labels
        if record.labels.any():
            areas = _class_areas(record, times, there, rules)
            once = np.ones((1, times.shape[1]), np.int64)
            whole = _class_areas(record, once, once @ record.labels, rules)
            total += np.where(there > 0, areas, whole)
        classes += bool(record.labels.any()) or rules.absent == "zero"
        labels += there
    total[labels == 0] = np.nan
    return total / max(classes, 1)


def _class_areas(
    record: ClassRecord,
    times: npt.NDArray[np.int64],
    labels: npt.NDArray[np.int64],
    rules: DetectionRules,
) -> Floats:
    areas: Floats = _areas(
        record.scenes, record.hits, times, labels, RECALLS, first_recall(rules),
        rules.min_precision,
    )  # fmt: skip
    return areas


@numba.njit(cache=True)
def _areas(
    scenes: Any, hits: Any, times: Any, labels: Any, recalls: Any, first: int, least: float
) -> Any:
    """Average precision of every draw, the mean over the limits; 0 without labels."""
    # `_curve.curve` and `average_precision` in one pass, without arrays in between.
    result = np.zeros(len(times))
    for draw in range(len(times)):
        for limit in range(hits.shape[1] if labels[draw] > 0 else 0):
            right, seen, area = 0, 0, 0.0
            recall, precision, place = 0.0, 1.0, 0
            started = False
            for row in range(len(scenes)):
                for _ in range(times[draw, scenes[row]]):
                    seen += 1
                    right += hits[row, limit]
                    next_recall, next_precision = right / labels[draw], right / seen
                    if not started:
                        recall, precision, started = next_recall, next_precision, True
                    # Recalls in between are read off the line that joins the two points.
                    while place < len(recalls) and recalls[place] < next_recall:
                        value = precision
                        if recalls[place] > recall:
                            slope = (next_precision - precision) / (next_recall - recall)
                            value = slope * (recalls[place] - recall) + precision
                        if place >= first and value > least:
                            area += (value - least) / (1.0 - least)
                        place += 1
                    recall, precision = next_recall, next_precision
            if started and place < len(recalls) and recalls[place] == recall:
                if place >= first and precision > least:
                    area += (precision - least) / (1.0 - least)
            result[draw] += area / (len(recalls) - first)
    return result / hits.shape[1]
