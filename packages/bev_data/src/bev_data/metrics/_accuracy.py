"""Several models on the same labelled frames, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from bev_data.datasets import labelled_region, scene_name
from bev_data.metrics._accumulator import DetectionAccumulator
from bev_data.metrics._bootstrap import Bootstrap, Interval, interval_of_mean_ap
from bev_data.metrics._evaluate import Difference, difference
from bev_data.metrics._result import DetectionMetrics, metrics_of
from bev_data.metrics._rules import DetectionRules

if TYPE_CHECKING:
    from bev_data.boxes import Detections
    from bev_data.points import Labels

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
