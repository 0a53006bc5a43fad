"""Detections of two models against each other: which agree, and which labels both find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from bev_data.boxes import Detections
    from bev_data.points import Labels

DISTANCES = (0.5, 1.0, 2.0)
Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class AgreementRow:
    """Agreement of the detections of two models, over all frames.

    A detection of the float and one of the quantized model match if they have the same class and
    their centres are within `distance` metres in the bird's-eye view, one to one. `score_mean` and
    `score_max` are the mean and largest |quantized − float| of the scores of matched detections;
    None without matches.
    """

    distance: float
    float_detections: int
    quantized_detections: int
    matched: int
    score_mean: float | None
    score_max: float | None


@dataclass(frozen=True)
class FoundRow:
    """How many labelled objects have a detection of their class within `distance`, one to one.

    Scores play no part but for the order in which detections choose, so this is the recall of all
    detections, not an average precision. Counted are labels of the model's classes inside its map
    and, where the points inside are known, with at least one.
    """

    distance: float
    labels: int
    found_float: int
    found_quantized: int


def match(
    centres: Floats, classes: Sequence[object], others: Floats, other_classes: Sequence[object],
    distance: float,
) -> list[tuple[int, int]]:  # fmt: skip
    """Pairs of one class at most `distance` apart, one to one.

    Each of `centres`, in the order given, takes the nearest of `others` that is still free.

    Args:
        centres: float [n, 2 or more], x and y [m].
        classes: Their classes.
        others: float [m, 2 or more].
        other_classes: Theirs.
        distance: [m], itself included.

    Returns:
        (index in `centres`, index in `others`).

    Example:
        >>> import numpy as np
        >>> a, b = np.array([[0.0, 0.0], [3.0, 0.0]]), np.array([[0.4, 0.0], [0.1, 0.0]])
        >>> match(a, ["car", "car"], b, ["car", "car"], 1.0)
        [(0, 1)]
    """
    if not len(centres) or not len(others):
        return []
    apart = np.linalg.norm(centres[:, None, :2] - others[None, :, :2], axis=2)
    same = np.array([[a == b for b in other_classes] for a in classes], bool)
    apart[~same] = np.inf
    pairs = []
    for index, row in enumerate(apart):
        nearest = int(row.argmin())
        if row[nearest] <= distance:
            pairs.append((index, nearest))
            apart[:, nearest] = np.inf
    return pairs


@dataclass
class AgreementAccumulator:
    """Counts over frames; `agreement` and `found` are the tables.

    Args:
        classes: The model's class names, by number.
        extent: Low x and y, high x and y of its map [m].
    """

    classes: Sequence[str]
    extent: tuple[float, float, float, float]
    _detections: list[tuple[int, int]] = field(default_factory=list)
    _differences: dict[float, list[float]] = field(
        default_factory=lambda: {d: [] for d in DISTANCES}
    )
    _labels: int = 0
    _found: dict[float, list[int]] = field(default_factory=lambda: {d: [0, 0] for d in DISTANCES})
    labelled_frames: int = 0

    def add(self, wanted: Detections, got: Detections, labels: Labels | None) -> None:
        """Count one frame: the float model's detections, the quantized one's, labels if any."""
        self._detections.append((len(wanted.scores), len(got.scores)))
        for distance in DISTANCES:
            pairs = match(
                wanted.boxes, wanted.labels.tolist(), got.boxes, got.labels.tolist(), distance
            )
            self._differences[distance] += [
                abs(float(got.scores[j]) - float(wanted.scores[i])) for i, j in pairs
            ]
        if labels is None:
            return
        self.labelled_frames += 1
        counted = self._counted(labels)
        boxes, names = labels.boxes[counted], [labels.names[i] for i in counted]
        self._labels += len(counted)
        for side, found in enumerate((wanted, got)):
            kinds = [self.classes[number] for number in found.labels]
            for distance in DISTANCES:
                self._found[distance][side] += len(
                    match(found.boxes, kinds, boxes, names, distance)
                )

    def agreement(self) -> list[AgreementRow]:
        """One row for each distance."""
        first, second = (sum(counts) for counts in zip(*self._detections, strict=True))
        return [
            AgreementRow(
                distance,
                first,
                second,
                len(differences),
                float(np.mean(differences)) if differences else None,
                float(np.max(differences)) if differences else None,
            )
            for distance, differences in self._differences.items()
        ]

    def found(self) -> list[FoundRow]:
        """One row for each distance; none where no frame has labels."""
        if not self.labelled_frames:
            return []
        return [FoundRow(d, self._labels, *counts) for d, counts in self._found.items()]

    def _counted(self, labels: Labels) -> npt.NDArray[np.int64]:
        low_x, low_y, high_x, high_y = self.extent
        x, y = labels.boxes[:, 0], labels.boxes[:, 1]
        kept = (low_x <= x) & (x <= high_x) & (low_y <= y) & (y <= high_y)
        kept &= np.array([name in self.classes for name in labels.names], bool)
        if labels.num_points is not None:
            kept &= labels.num_points > 0
        return np.flatnonzero(kept)
