"""Metrics of lists of frames, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bev_data._errors import InputError
from bev_data.boxes import NUSCENES_CLASSES
from bev_data.metrics._accumulator import DetectionAccumulator
from bev_data.metrics._bootstrap import (
    Bootstrap,
    Interval,
    interval_of_difference,
    interval_of_mean_ap,
)
from bev_data.metrics._result import DetectionMetrics, metrics_of

if TYPE_CHECKING:
    from bev_data.boxes import Detections
    from bev_data.metrics._rules import DetectionRules
    from bev_data.points import Labels


@dataclass(frozen=True)
class Difference:
    """A model's mean average precision less another one's, with its paired interval."""

    mean_ap: float | None = None
    interval: Interval | None = None


def evaluate_detections(
    predictions: Sequence[Detections],
    labels: Sequence[Labels],
    classes: Sequence[str] = NUSCENES_CLASSES,
    *,
    rules: DetectionRules | None = None,
    scenes: Sequence[str] | None = None,
    bootstrap: Bootstrap | None = None,
) -> DetectionMetrics:
    """nuScenes-style and KITTI-style metrics of detections against labels.

    Average precisions and errors equal those of nuscenes-devkit's `accumulate`, `calc_ap` and
    `calc_tp` on the same boxes. Of detections with equal scores the one of the later frame comes
    first, and within a frame the later row, as there; the result depends on nothing else.

    Args:
        predictions: Detections of the model, frame by frame.
        labels: Labels, frame by frame.
        classes: The model's class names, by number; labels of other names do not count.
        rules: Evaluation rules. Default: nuScenes'.
        scenes: A scene name for each frame; the bootstrap draws all frames of a scene together.
            Default: each frame is a scene of its own.
        bootstrap: Method of the interval of the mean average precision; None for no interval.

    Raises:
        InputError: Lists of different lengths, NaN or infinity, a negative size, an unknown class,
            or arrays that do not fit; the message names the frame.

    Example:
        >>> import numpy as np
        >>> from bev_data.boxes import Detections
        >>> from bev_data.points import Labels
        >>> boxes = np.array([[5, 9, -1, 4.5, 1.9, 1.6, 0]], np.float32)
        >>> shifted = boxes + np.float32([0.75, 0, 0, 0, 0, 0, 0])
        >>> found = Detections(shifted, np.ones(1), np.array([0]), np.zeros((1, 2)))
        >>> metrics = evaluate_detections([found], [Labels(boxes, ("car",))])
        >>> metrics.average_precision, metrics.errors["ATE"]
        ({0.5: 0.0, 1.0: 1.0, 2.0: 1.0, 4.0: 1.0}, 0.75)
    """
    accumulator = _accumulated(predictions, labels, classes, rules, scenes)
    return metrics_of(
        accumulator, None if bootstrap is None else interval_of_mean_ap(accumulator, bootstrap)
    )


def compare_detections(
    predictions: Sequence[Detections],
    reference: Sequence[Detections],
    labels: Sequence[Labels],
    classes: Sequence[str] = NUSCENES_CLASSES,
    *,
    rules: DetectionRules | None = None,
    scenes: Sequence[str] | None = None,
    bootstrap: Bootstrap | None = None,
) -> Difference:
    """Mean average precision of `predictions` minus that of `reference`, on the same frames.

    The bootstrap draws the same scenes for both, so the difficulty of a scene cancels and the
    interval is narrower than those of the two models.

    Args:
        predictions: Detections of one model, frame by frame.
        reference: Detections of the other, frame by frame.
        labels: Labels, frame by frame.
        classes: As in `evaluate_detections`.
        rules: The same.
        scenes: The same.
        bootstrap: Method of the interval. Default: `Bootstrap()`.

    Raises:
        InputError: As `evaluate_detections`.
    """
    accumulators = [
        _accumulated(p, labels, classes, rules, scenes) for p in (predictions, reference)
    ]
    return difference(*accumulators, bootstrap=bootstrap or Bootstrap())


def difference(
    model: DetectionAccumulator, reference: DetectionAccumulator, *, bootstrap: Bootstrap
) -> Difference:
    """The same of two meters."""
    interval = interval_of_difference(model, reference, bootstrap)
    first, second = (metrics_of(accumulator).mean_ap for accumulator in (model, reference))
    return Difference(None if first is None or second is None else first - second, interval)


def _accumulated(
    predictions: Sequence[Detections],
    labels: Sequence[Labels],
    classes: Sequence[str],
    rules: DetectionRules | None,
    scenes: Sequence[str] | None,
) -> DetectionAccumulator:
    if len(predictions) != len(labels) or (scenes is not None and len(scenes) != len(labels)):
        named = "" if scenes is None else f", {len(scenes)} scene names"
        raise InputError(
            f"metrics: {len(predictions)} frames of detections, {len(labels)} of labels{named}: "
            "give one of each for every frame"
        )
    accumulator = DetectionAccumulator(classes, rules)
    for index, (found, there) in enumerate(zip(predictions, labels, strict=True)):
        accumulator.add(found, there, scene=None if scenes is None else scenes[index])
    return accumulator
