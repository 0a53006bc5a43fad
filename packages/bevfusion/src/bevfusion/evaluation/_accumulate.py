"""Empty tallies for models of a configuration, and models whose detections fill one."""

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
    config: Sizes, batches: FrameBatches, bootstrap: Bootstrap | None = None
) -> AccuracyAccumulator:
    """An empty tally for the models of `config` on these frames.

    Args:
        config: Sizes: the map's extent, the classes.
        batches: The frames; their data set says from where distances count and what is a scene.
        bootstrap: How intervals are found; `Bootstrap()` by default.
    """
    rules = detection_rules(config, batches)
    return AccuracyAccumulator(config.head.classes, rules, bootstrap, batches.dataset)


def detection_rules(config: Sizes, batches: FrameBatches) -> DetectionRules:
    """What counts of these frames: boxes in the map, distances from where the data set has them."""
    return DetectionRules(extent=config.lidar.extent, origin=range_origin(batches.dataset))


def agreement_accumulator(config: Sizes) -> AgreementAccumulator:
    """An empty tally of two models of `config` against each other."""
    return AgreementAccumulator(config.head.classes, config.lidar.extent)


class ModelAccumulators:
    """Detections of a float model against those of others, and of all of them by the labels.

    Args:
        config: Sizes.
        accuracy: Is handed every model's detections, under its name.

    Attributes:
        first: Each model's of the first frame; empty before, and without a head.
        float_detections: The float model's, frame by frame.
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
            found: What each model found, "float" first.
            labels: What there is; None for a frame that nobody labelled.
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
        """How a model's detections agree with the float one's, which labels both find."""
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
    """Hand every model's detections to the accumulator, in order of frames.

    Of several ranks each runs its share of the frames.

    Args:
        step: Names the records in `shards`.
        models: What is run on each frame, by its name in the accumulator.
        detector: Makes the boxes of any model's outputs.
        batches: The frames.
        accumulator: Takes the detections.
        shards: Keeps finished frames; None keeps nothing.

    Yields:
        The index of each frame that is counted.
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


def evaluate_detector(model: Detector, batches: FrameBatches, config: Sizes) -> dict[str, Any]:
    """NuScenes' metrics of a float model, frame by frame in little memory.

    Args:
        model: In eval mode, on the CPU.
        batches: Of labelled frames.
        config: Sizes.

    Returns:
        JSON: labels, mean_ap, interval (95 %, over frames), nds, and mean_ap by class; of a fused
        model also what it finds with grey pictures (mean_ap_without_pictures), which tells what
        the cameras add to the LiDAR in this very model.

    Raises:
        InputError: A frame has no labels.
    """
    accumulator, blind = (DetectionAccumulator(config.head.classes) for _ in range(2))
    fused = {"camera", "lidar"} <= set(model.parts)
    with torch.no_grad():
        for index in tqdm(range(len(batches)), desc="held out", disable=None):
            batch = batches[index]
            labels = batches.frame_labels(index)
            if labels is None:
                raise InputError(f"{batches.names[index][0]}: no labels to judge by")
            accumulator.add(batches.boxes(model, model(*batch), batch), labels)
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
    """What `evaluate_detector` found: labels, mAP and NDS, then each class; 0 to 1.

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
