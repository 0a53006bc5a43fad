"""Empty tallies for the models of a run, and models whose detections fill one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from bev_data.datasets import range_origin
from bev_data.metrics import AccuracyTally, Bootstrap, DetectionRules, DetectionTally
from bevfusion_quant.frames import detections_of, detections_record, note_of, note_record
from bevfusion_quant.ranks import in_order

if TYPE_CHECKING:
    from bevfusion.model import BEVFusionConfig
    from bevfusion_quant.frames import FrameBatches
    from bevfusion_quant.ranks import Shards

__all__ = ["Model", "accuracy_tally", "detection_rules", "detection_tally", "tally_models"]

Model = Callable[..., Any]


def accuracy_tally(
    config: BEVFusionConfig, batches: FrameBatches, bootstrap: Bootstrap | None = None
) -> AccuracyTally:
    """An empty tally for the models of `config` on these frames.

    Args:
        config: Sizes: the map's extent, the classes.
        batches: The frames; their data set says from where distances count and what is a scene.
        bootstrap: How intervals are found; `Bootstrap()` by default.
    """
    rules = detection_rules(config, batches)
    return AccuracyTally(config.head.classes, rules, bootstrap, batches.dataset)


def detection_rules(config: BEVFusionConfig, batches: FrameBatches) -> DetectionRules:
    """What counts of these frames: boxes in the map, distances from where the data set has them."""
    return DetectionRules(extent=config.lidar.extent, origin=range_origin(batches.dataset))


def detection_tally(config: BEVFusionConfig) -> DetectionTally:
    """An empty tally of two models of `config` against each other."""
    return DetectionTally(config.head.classes, config.lidar.extent)


def tally_models(
    step: str,
    models: Mapping[str, Model],
    decode: Callable[[Any], Any],
    batches: FrameBatches,
    tally: AccuracyTally,
    shards: Shards | None = None,
) -> Iterator[int]:
    """Hand every model's detections to the tally, in order of frames.

    Of several ranks each runs its share of the frames.

    Args:
        step: Names the records in `shards`.
        models: What is run on each frame, by its name in the tally.
        decode: Boxes from an output, of the head that all of them have.
        batches: The frames.
        tally: Takes the detections.
        shards: Keeps finished frames; None keeps nothing.

    Yields:
        The index of each frame that is counted.
    """

    def run(index: int) -> dict[str, Any]:
        batch = batches[index]
        record = note_record(batches.note(index))
        with torch.no_grad():
            for who, model in models.items():
                record |= detections_record(who, decode(model(*batch))[0])
        return record

    for index, record in in_order(step, len(batches), run, shards):
        note = note_of(record)
        batches.learn(index, note)
        for who in models:
            tally.add(who, index, note.name, detections_of(who, record), note.labels)
        yield index
