"""Metrics of lists of frames in one call, and of several models side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from bev_data._errors import InputError
from bev_data.boxes import NUSCENES_CLASSES
from bev_data.datasets import labelled_region, scene_name
from bev_data.metrics._accumulator import DetectionAccumulator
from bev_data.metrics._bootstrap import (
    Bootstrap,
    Interval,
    interval_of_difference,
    interval_of_mean_ap,
)
from bev_data.metrics._result import DetectionMetrics, metrics_of
from bev_data.metrics._rules import DetectionRules

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


# Several models on the same labelled frames, side by side.

SKETCHES = 6  # frames that are kept for pictures


@dataclass(frozen=True, eq=False)
class ModelAccuracy:
    """One of the models.

    Attributes:
        model: Its name, such as "float".
        metrics: Its metrics, with the interval of its mAP.
        difference: Its mAP minus the first model's, paired; None for the first model.
    """

    model: str
    metrics: DetectionMetrics
    difference: Difference | None


@dataclass(frozen=True, eq=False)
class Sketch:
    """One frame for a picture: its labels, and each model's detections by the model's name."""

    frame: str
    labels: Labels
    found: dict[str, Detections]


@dataclass(frozen=True, eq=False)
class Accuracy:
    """Metrics of several models.

    Attributes:
        models: The first is the reference of the others.
        unlabelled: Number of frames without labels, which were skipped.
        drawn: Unit of the bootstrap: "scenes" or "frames".
        bootstrap: Method of the intervals.
        rules: Evaluation rules.
        sketches: The first few frames, for pictures.
        classes: The models' class names, by number.
    """

    models: tuple[ModelAccuracy, ...]
    unlabelled: int
    drawn: str
    bootstrap: Bootstrap
    rules: DetectionRules
    sketches: tuple[Sketch, ...]
    classes: tuple[str, ...]

    @property
    def reference(self) -> DetectionMetrics:
        """The first model's metrics."""
        return self.models[0].metrics

    def summary(self) -> dict[str, Any]:
        """Everything but curves and boxes, for JSON."""
        return {
            "frames": self.reference.frames,
            "frames_without_labels": self.unlabelled,
            "labels": self.reference.labels,
            "bootstrap": {"draws": self.drawn, **vars(self.bootstrap)},
            "rules": self.rules,
            "models": {
                entry.model: {**entry.metrics.summary(), "difference": entry.difference}
                for entry in self.models
            },
        }


DifferenceSummary = Difference


class ModelSummary(msgspec.Struct):
    """One model in an `AccuracySummary`; `difference` is from the first."""

    mean_ap: float | None = None
    interval: Interval | None = None
    nds: float | None = None
    missing: list[str] = []
    difference: DifferenceSummary | None = None


class AccuracySummary(msgspec.Struct):
    """Fields of `Accuracy.summary` about the models, read from JSON."""

    labels: int | None = None
    models: dict[str, ModelSummary] = {}


class AccuracyAccumulator:
    """Takes the models' detections frame by frame, and stores a few bytes per detection.

    Args:
        classes: The models' class names, by number.
        rules: Evaluation rules.
        bootstrap: Method of the intervals.
        dataset: Kind of the data set, which defines labelled regions and scenes; None for other
            frames.
    """

    def __init__(
        self,
        classes: Sequence[str],
        rules: DetectionRules | None = None,
        bootstrap: Bootstrap | None = None,
        dataset: str | None = None,
    ) -> None:
        self._classes = tuple(classes)
        self._rules, self._bootstrap = rules or DetectionRules(), bootstrap or Bootstrap()
        self._dataset, self._region = dataset, labelled_region(dataset)
        self._accumulators: dict[str, DetectionAccumulator] = {}
        self._sketches: dict[int, Sketch] = {}
        self._unlabelled: dict[str, int] = {}

    def add(
        self, model: str, index: int, name: str, found: Detections, labels: Labels | None
    ) -> None:
        """Take one frame of one model; every model gets the same frames in the same order.

        Args:
            model: Its name.
            index: The frame's number.
            name: The frame's name.
            found: Detections of the model.
            labels: Labels; None for an unlabelled frame.
        """
        accumulator = self._accumulators.get(model)
        if accumulator is None:
            accumulator = self._accumulators[model] = DetectionAccumulator(
                self._classes, self._rules
            )
            self._unlabelled[model] = 0
        if labels is None:
            self._unlabelled[model] += 1
            return
        scene = scene_name(self._dataset, name)
        accumulator.add(found, labels, scene=scene, region=self._region)
        if accumulator.frames <= SKETCHES:
            sketch = self._sketches.setdefault(index, Sketch(name, labels, {}))
            sketch.found[model] = found

    def result(self) -> Accuracy | None:
        """The metrics; None if no frame had labels."""
        accumulators = list(self._accumulators.items())
        if not accumulators or not accumulators[0][1].frames:
            return None
        reference = accumulators[0][1]
        models = []
        for index, (name, accumulator) in enumerate(accumulators):
            interval = interval_of_mean_ap(accumulator, self._bootstrap)
            apart = None
            if index:
                apart = difference(accumulator, reference, bootstrap=self._bootstrap)
            models.append(ModelAccuracy(name, metrics_of(accumulator, interval), apart))
        return Accuracy(
            tuple(models),
            self._unlabelled[accumulators[0][0]],
            "frames" if scene_name(self._dataset, "a_b") is None else "scenes",
            self._bootstrap,
            self._rules,
            tuple(self._sketches.values()),
            self._classes,
        )
