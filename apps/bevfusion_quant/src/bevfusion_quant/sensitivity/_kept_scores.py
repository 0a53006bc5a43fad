"""What a score gave for the variants of one frame, as arrays on disk and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bevfusion.model.head import Detections
from bevfusion_quant.frames import detections_of, detections_record

if TYPE_CHECKING:
    from bevfusion_quant.ranks import Record, Shards

__all__ = ["KeptScores"]


class KeptScores:
    """`bevquant_qnn.Kept` in a run's shards: pairs of numbers, or boxes.

    Args:
        shards: Of the run.
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
