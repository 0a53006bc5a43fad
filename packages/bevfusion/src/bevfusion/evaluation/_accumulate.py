"""Accumulators for the models of a configuration, and the loop that fills them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from bev_data import InputError
from bev_data.datasets import range_origin
from bev_data.metrics import (
    AccuracyAccumulator,
    AgreementAccumulator,
    AgreementRow,
    Bootstrap,
    DetectionAccumulator,
    DetectionRules,
    FoundRow,
    interval_of_mean_ap,
    metrics_of,
)
from bevfusion.evaluation._notes import detections_of, detections_record, note_of, note_record
from bevquant_quantizers.ranks import in_order

if TYPE_CHECKING:
    from bev_data.points import Labels
    from bevfusion.evaluation._batches import FrameBatches
    from bevfusion.model import Detector, Sizes
    from bevfusion.model.head import Detections
    from bevquant_quantizers.ranks import Shards


def accuracy_accumulator(
    batches: FrameBatches, bootstrap: Bootstrap | None = None
) -> AccuracyAccumulator:
    """An empty accumulator of scores for the models of these frames.

    Args:
        batches: The frames; their data set defines the origin of distances and the scenes.
        bootstrap: Method of the intervals. Default: `Bootstrap()`.
    """
    classes, rules = batches.sizes.head.classes, detection_rules(batches)
    return AccuracyAccumulator(classes, rules, bootstrap, batches.dataset)


def detection_rules(batches: FrameBatches) -> DetectionRules:
    """Evaluation rules: boxes on the map, distances from the data set's origin."""
    return DetectionRules(extent=batches.sizes.lidar.extent, origin=range_origin(batches.dataset))


def agreement_accumulator(config: Sizes) -> AgreementAccumulator:
    """An empty accumulator of the agreement of two models of `config`."""
    return AgreementAccumulator(config.head.classes, config.lidar.extent)


class ModelAccumulators:
    """Detections of models against those of the float model, and of all models against labels.

    Args:
        config: Sizes.
        accuracy: Receives every model's detections by name.

    Attributes:
        first: Each model's detections of the first frame; empty without a head.
        float_detections: The float model's detections, frame by frame.
    """

    def __init__(self, config: Sizes, accuracy: AccuracyAccumulator | None = None) -> None:
        self._config, self._accuracy = config, accuracy
        self._accumulators: dict[str, AgreementAccumulator] = {}
        self.first: dict[str, Detections] = {}
        self.float_detections: list[Detections] = []

    def add(
        self, index: int, name: str, found: Mapping[str, Detections], labels: Labels | None
    ) -> None:
        """Count one frame.

        Args:
            index: Its number.
            name: Its name.
            found: Detections of each model, "float" first.
            labels: Its labels; None for an unlabelled frame.
        """
        labels = labels if self._config.head.classes else None  # whose names nothing is known of
        self.first = self.first or dict(found)
        self.float_detections.append(found["float"])
        for who, detections in found.items():
            if who != "float":
                accumulator = self._accumulators.setdefault(
                    who, agreement_accumulator(self._config)
                )
                accumulator.add(found["float"], detections, labels)
            if self._accuracy is not None:
                self._accuracy.add(who, index, name, detections, labels)

    def rows(self, who: str) -> tuple[list[AgreementRow], list[FoundRow]]:
        """Agreement of a model's detections with the float model's, and labels that both find."""
        accumulator = self._accumulators.get(who)
        return ([], []) if accumulator is None else (accumulator.agreement(), accumulator.found())


def accumulate_models(
    step: str,
    models: Mapping[str, Callable[..., Any]],
    detector: Detector,
    batches: FrameBatches,
    accumulator: AccuracyAccumulator,
    shards: Shards | None = None,
) -> Iterator[int]:
    """Run the models and pass their detections to the accumulator, in order of frames.

    With several ranks, each runs its share of the frames.

    Args:
        step: Name of the records in `shards`.
        models: Models to run on each frame, by name in the accumulator.
        detector: Makes boxes of any model's outputs.
        batches: The frames.
        accumulator: Receives the detections.
        shards: Storage of finished frames; None for none.

    Yields:
        The index of each counted frame.
    """

    def run(index: int) -> dict[str, Any]:
        batch = batches[index]
        record = note_record(batches.note(index))
        with torch.no_grad():
            for who, model in models.items():
                found = batches.boxes(detector, model(*batch), batch)
                record |= detections_record(who, found)
        return record

    for index, record in in_order(step, len(batches), run, shards):
        note = note_of(record)
        batches.learn(index, note)
        for who in models:
            accumulator.add(who, index, note.name, detections_of(who, record), note.labels)
        yield index


def evaluate_detector(model: Detector, batches: FrameBatches) -> dict[str, Any]:
    """NuScenes' metrics of a float model, frame by frame in little memory.

    Args:
        model: In eval mode, on the CPU.
        batches: Labelled frames.

    Returns:
        JSON: labels, mean_ap, interval (95 %, over frames), nds, and mean_ap by class. A fused
        model also has mean_ap_without_pictures, its score with grey pictures, which shows the
        cameras' contribution.

    Raises:
        InputError: A frame has no labels.
    """
    accumulator, blind = (DetectionAccumulator(batches.sizes.head.classes) for _ in range(2))
    fused = {"camera", "lidar"} <= set(model.parts)
    with torch.no_grad():
        for index in tqdm(range(len(batches)), desc="held out", disable=None):
            batch = batches[index]
            labels = batches.frame_labels(index)
            if labels is None:
                raise InputError(f"{batches.names[index][0]}: no labels to judge by")
            accumulator.add(batches.boxes(model, model(*batch), batch), labels)
            # What the cameras add: the same frames with grey pictures.
            if fused and batch.images is not None:
                grey = batch._replace(images=torch.zeros_like(batch.images))
                blind.add(batches.boxes(model, model(*grey), batch), labels)
    interval = interval_of_mean_ap(accumulator, Bootstrap())
    metrics = metrics_of(accumulator, interval)
    without = {"mean_ap_without_pictures": metrics_of(blind).mean_ap} if fused else {}
    return {
        "count": metrics.frames,
        "labels": metrics.labels,
        "mean_ap": metrics.mean_ap,
        "interval": None if interval is None else [interval.low, interval.high],
        **without,
        "nds": metrics.nds,
        "classes": {row.name: row.mean_ap for row in metrics.classes},
    }


def evaluation_text(found: Mapping[str, Any]) -> str:
    """The result of `evaluate_detector` as text: labels, mAP and NDS, then each class; 0 to 1.

    Example:
        >>> found = {"labels": 1200, "mean_ap": 0.5, "interval": [0.4, 0.6], "nds": None}
        >>> print(evaluation_text({**found, "classes": {"car": 0.5, "bus": None}}))
        1,200 labels
        mAP 0.500 (0.400 to 0.600), NDS none
        car 0.500, bus none
    """

    def number_text(value: float | None) -> str:
        return "none" if value is None else f"{value:.3f}"

    interval = ""
    if found["interval"] is not None:
        interval = f" ({number_text(found['interval'][0])} to {number_text(found['interval'][1])})"
    without = ""
    if "mean_ap_without_pictures" in found:
        without = f", with grey pictures {number_text(found['mean_ap_without_pictures'])}"
    classes = ", ".join(f"{name} {number_text(value)}" for name, value in found["classes"].items())
    return (
        f"{found['labels']:,} labels\n"
        f"mAP {number_text(found['mean_ap'])}{interval}{without}, "
        f"NDS {number_text(found['nds'])}\n{classes}"
    )
