"""Matched detections of one model, frame after frame, in a few bytes per detection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError
from bev_data.metrics._match import (
    Region,
    by_distance,
    by_overlap,
    counted_detections,
    counted_labels,
    true_positive_errors,
)
from bev_data.metrics._rules import ERRORS, DetectionRules

if TYPE_CHECKING:
    from bev_data.boxes import Detections
    from bev_data.points import Labels

Floats = npt.NDArray[np.float64]


class ClassRecord(NamedTuple):
    """All detections of one class, best score first; of equal ones the later comes first.

    Attributes:
        scores: float64 [n].
        scenes: int32 [n], the scene's number.
        hits: bool [n, distances], whether it took a label.
        overlap_hits: bool [n, overlaps].
        errors: float64 [hits at the error distance, 4], in the order of these hits.
        labels: int64 [scenes], labels of the class in each scene.
    """

    scores: Floats
    scenes: npt.NDArray[np.int32]
    hits: npt.NDArray[np.bool_]
    overlap_hits: npt.NDArray[np.bool_]
    errors: Floats
    labels: npt.NDArray[np.int64]


class _Frame(NamedTuple):
    """Stored results of a frame."""

    scene: int
    kinds: npt.NDArray[np.int16]
    scores: Floats
    hits: npt.NDArray[np.bool_]
    errors: Floats
    labels: npt.NDArray[np.int64]


class DetectionAccumulator:
    """Takes detections and labels frame by frame; stores the metrics' data, not the boxes.

    Detections are matched within their frame at once. Stored are a score, a class and a hit or miss
    for each limit: about 20 bytes per counted detection.

    Args:
        classes: The model's class names, by number.
        rules: Evaluation rules.

    Example:
        >>> from bev_data.boxes import Detections
        >>> from bev_data.points import Labels
        >>> boxes = np.array([[5, 9, -1, 4.5, 1.9, 1.6, 0]], np.float32)
        >>> one = np.ones(1, np.float32)
        >>> accumulator = DetectionAccumulator(("car", "truck"))
        >>> found = Detections(boxes, one, np.array([0]), np.zeros((1, 2)))
        >>> accumulator.add(found, Labels(boxes, ("car",)))
        >>> accumulator.frames, accumulator.labels
        (1, 1)
    """

    def __init__(self, classes: Sequence[str], rules: DetectionRules | None = None) -> None:
        if not classes or len(set(classes)) < len(classes):
            raise InputError(f"classes {list(classes)}: at least one, each with a name of its own")
        self.classes = tuple(classes)
        self.rules = rules or DetectionRules()
        self.velocities_known = False
        self._scenes: dict[str, int] = {}
        self._kept: list[_Frame] = []

    @property
    def frames(self) -> int:
        """How many frames were added."""
        return len(self._kept)

    @property
    def scenes(self) -> tuple[str, ...]:
        """Names of the scenes, in the order of their first frames."""
        return tuple(self._scenes)

    @property
    def labels(self) -> int:
        """How many labels count."""
        return sum(int(frame.labels.sum()) for frame in self._kept)

    def add(
        self,
        found: Detections,
        labels: Labels,
        *,
        scene: str | None = None,
        region: Region | None = None,
    ) -> None:
        """Take one frame.

        Args:
            found: Detections of the model.
            labels: Labels; empty for a labelled frame without objects.
            scene: Name of the scene; the bootstrap draws all frames of a scene together. None makes
                each frame a scene of its own.
            region: Labelled region, if not everywhere: maps boxes [n, 7] to bool [n]; boxes outside
                count neither as labels nor as detections.

        Raises:
            InputError: NaN or infinity, a negative size, an unknown class, or arrays that do not
                fit.
        """
        try:
            there = counted_labels(labels, self.classes, self.rules, region)
            seen = counted_detections(found, labels, self.classes, self.rules, region)
        except InputError as error:
            raise InputError(f"metrics, frame {self.frames}: {error}") from error
        near = by_distance(seen, there, self.rules)
        taken = near[self.rules.distances.index(self.rules.error_distance)]
        hits = np.concatenate([near, by_overlap(seen, there, self.rules)]).T >= 0
        name = f"frame {self.frames}" if scene is None else scene
        self.velocities_known |= bool(np.isfinite(there.velocities).any())
        self._kept.append(
            _Frame(
                self._scenes.setdefault(name, len(self._scenes)),
                seen.kinds.astype(np.int16),
                seen.scores,
                hits,
                true_positive_errors(seen, there, taken, self.classes),
                np.bincount(there.kinds, minlength=len(self.classes)),
            )
        )

    def records(self) -> list[ClassRecord]:
        """Stored results, class by class."""
        count, limits = len(self.classes), len(self.rules.distances)
        frames = self._kept
        width = limits + len(self.rules.overlaps)
        kinds = np.concatenate([np.zeros(0, np.int16), *(f.kinds for f in frames)])
        scores = np.concatenate([np.zeros(0), *(f.scores for f in frames)])
        hits = np.concatenate([np.zeros((0, width), np.bool_), *(f.hits for f in frames)])
        errors = np.concatenate([np.zeros((0, len(ERRORS))), *(f.errors for f in frames)])
        sizes = [len(f.kinds) for f in frames]
        scenes = np.repeat(np.array([f.scene for f in frames], np.int32), sizes)
        labels = np.zeros((len(self._scenes), count), np.int64)
        for frame in frames:
            labels[frame.scene] += frame.labels
        best = hits[:, self.rules.distances.index(self.rules.error_distance)]
        place = np.cumsum(best) - 1  # of a hit's errors
        records = []
        for kind in range(count):
            rows = np.flatnonzero(kinds == kind)
            rows = rows[np.argsort(scores[rows], kind="stable")[::-1]]
            records.append(
                ClassRecord(
                    scores[rows],
                    scenes[rows],
                    hits[rows, :limits],
                    hits[rows, limits:],
                    errors[place[rows[best[rows]]]],
                    labels[:, kind],
                )
            )
        return records
