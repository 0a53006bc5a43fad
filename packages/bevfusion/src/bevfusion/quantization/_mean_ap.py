"""nuScenes' mean average precision as a metric of sensitivity, with stored results of frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from bev_data import InputError
from bev_data.datasets import labelled_region
from bev_data.metrics import DetectionAccumulator, metrics_of
from bevfusion.evaluation import FrameBatches, detection_rules, detections_of, detections_record
from bevfusion.model import Detector, Sizes
from bevfusion.model.head import Detections
from bevquant_quantizers.ranks import Record, Shards


class KeptScores:
    """`bevquant_qnn.Kept` in a run's shards: pairs of numbers, or boxes.

    Args:
        shards: Shards of the run.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def load(self, step: str, index: int) -> list[Any] | None:
        """The results of a frame, if it was finished before."""
        record = self._shards.load(step, index)
        if record is None:
            return None
        if "numbers" in record:
            return [tuple(row) for row in record["numbers"].tolist()]
        return _boxes(record)

    def save(self, step: str, index: int, results: list[Any]) -> None:
        """Keep the results of a frame, whole or not at all."""
        if not isinstance(results[0], Detections):
            self._shards.save(step, index, {"numbers": np.array(results, np.float64)})
            return
        together = Detections(*(np.concatenate(arrays) for arrays in zip(*results, strict=True)))
        sizes = np.array([len(found.scores) for found in results], np.int64)
        self._shards.save(step, index, {"sizes": sizes, **detections_record("found", together)})


def _boxes(record: Record) -> list[Detections]:
    ends = np.cumsum(record["sizes"])[:-1]
    together = detections_of("found", record)
    parts = zip(*(np.split(array, ends) for array in together), strict=True)
    return [Detections(*arrays) for arrays in parts]


class MeanAp:
    """nuScenes' mean average precision over the labelled frames, in points of 100.

    Called with a batch's outputs, it returns the detections; `reduce` scores those of all batches,
    in order. Frames without labels are skipped.

    Args:
        model: The model; its head decodes.
        batches: The frames, for their labels.
        config: Sizes.
        shards: Storage of finished results while several ranks share the frames.

    Attributes:
        advice: Remedy in errors; a program names its own options.

    Raises:
        InputError: The model has no head, or no frame has labels.
    """

    __name__ = "mAP"  # what the table calls it
    advice: Mapping[str, str] = MappingProxyType(
        {
            "no head": "metric='mAP': the model is {} alone and makes no boxes: measure with "
            "metric='sqnr'",
            "no labels": "metric='mAP': none of the frames has labels: give frames that have "
            "(street, pandaset, kitti, nuscenes), or measure with metric='sqnr'",
            "none counts": "metric='mAP': no label of these frames counts (too far away, or "
            "without a point): give other frames, or more of them",
        }
    )

    def __init__(
        self,
        model: Detector,
        batches: FrameBatches,
        config: Sizes,
        shards: Shards | None = None,
    ) -> None:
        if not model.finds_boxes:
            raise InputError(self.advice["no head"].format(" and ".join(model.parts)))
        if all(batches.frame_labels(index) is None for index in range(len(batches))):
            raise InputError(self.advice["no labels"])
        self._model, self._batches, self._shards = model, batches, shards
        self._classes = config.head.classes
        self._rules = detection_rules(config, batches)
        self._region = labelled_region(batches.dataset)

    def __call__(self, output: Any, batch: object) -> Detections:
        """Boxes of one frame."""
        return self._batches.boxes(self._model, output, batch)

    def reduce(self, found: Sequence[Detections]) -> float:
        """Judge the boxes of all frames.

        Raises:
            InputError: No label counts.
        """
        self._batches.share_notes(self._shards)
        accumulator = DetectionAccumulator(self._classes, self._rules)
        for index, detections in enumerate(found):
            labels = self._batches.frame_labels(index)
            if labels is not None:
                accumulator.add(detections, labels, region=self._region)
        mean_ap = metrics_of(accumulator).mean_ap
        if mean_ap is None:
            raise InputError(self.advice["none counts"])
        return 100 * mean_ap
