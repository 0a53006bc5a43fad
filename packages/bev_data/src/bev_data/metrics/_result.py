"""Average precisions, errors and scores of one model, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bev_data.metrics._bootstrap import Interval
from bev_data.metrics._curve import (
    average_precision,
    bev_average_precision,
    curve,
    mean_errors,
)
from bev_data.metrics._match import undefined_errors
from bev_data.metrics._rules import ERRORS

if TYPE_CHECKING:
    from bev_data.metrics._accumulator import ClassRecord, DetectionAccumulator
    from bev_data.metrics._rules import DetectionRules

MEAN_AP_WEIGHT = 5


@dataclass(frozen=True, eq=False)
class ClassMetrics:
    """One class.

    Attributes:
        name: The class.
        labels: Number of counted labels.
        detections: Number of counted detections.
        average_precision: By distance [m], 0 to 1; None without labels if the rules leave such
            classes out.
        mean_ap: Mean of these.
        errors: By name of `ERRORS`; None if the class has no such error, or no labels.
        bev_ap: KITTI-style, by overlap.
        precision: By distance, float64 [101] at the recalls 0, 0.01, … 1.
    """

    name: str
    labels: int
    detections: int
    average_precision: Mapping[float, float | None]
    mean_ap: float | None
    errors: Mapping[str, float | None]
    bev_ap: Mapping[float, float | None]
    precision: Mapping[float, npt.NDArray[np.float64]]


@dataclass(frozen=True, eq=False)
class DetectionMetrics:
    """One model on one set of frames.

    Attributes:
        classes: Class by class.
        frames: Number of frames.
        labels: Number of counted labels.
        mean_ap: nuScenes' mAP: the mean over classes of the mean over distances; None if no class
            has labels.
        average_precision: By distance, the mean over classes.
        errors: By name of `ERRORS`, the mean over classes; None if not measurable.
        nds: (5 · mAP + Σ max(0, 1 − error)) / (5 + number of errors), over the measurable errors.
            nuScenes' own score includes AAE, which needs attributes.
        bev_ap: KITTI-style AP over 40 recalls, by overlap, the mean over classes.
        missing: Errors of nuScenes' score that `nds` leaves out.
        absent: Classes without labels.
        interval: Interval of `mean_ap`; None if not requested or not measurable.
    """

    classes: tuple[ClassMetrics, ...]
    frames: int
    labels: int
    mean_ap: float | None
    average_precision: Mapping[float, float | None]
    errors: Mapping[str, float | None]
    nds: float | None
    bev_ap: Mapping[float, float | None]
    missing: tuple[str, ...]
    absent: tuple[str, ...]
    interval: Interval | None = None

    def summary(self) -> dict[str, Any]:
        """Everything but the curves, for JSON."""
        entries: dict[str, Any] = {k: v for k, v in vars(self).items() if k != "classes"}
        entries["classes"] = [
            {k: v for k, v in vars(row).items() if k != "precision"} for row in self.classes
        ]
        return entries


def metrics_of(
    accumulator: DetectionAccumulator, interval: Interval | None = None
) -> DetectionMetrics:
    """All metrics of an accumulator's frames."""
    rules = accumulator.rules
    rows = tuple(
        _of_class(name, record, rules, accumulator.velocities_known)
        for name, record in zip(accumulator.classes, accumulator.records(), strict=True)
    )
    by_distance = {d: _mean(row.average_precision[d] for row in rows) for d in rules.distances}
    errors = {error: _mean(row.errors[error] for row in rows) for error in ERRORS}
    mean_ap = _mean(row.mean_ap for row in rows)
    known = [error for error in errors.values() if error is not None]
    nds = None
    if mean_ap is not None:
        scores = sum(max(0.0, 1.0 - error) for error in known)
        nds = (MEAN_AP_WEIGHT * mean_ap + scores) / (MEAN_AP_WEIGHT + len(known))
    return DetectionMetrics(
        rows,
        accumulator.frames,
        accumulator.labels,
        mean_ap,
        by_distance,
        errors,
        nds,
        {o: _mean(row.bev_ap[o] for row in rows) for o in rules.overlaps},
        (*(error for error, value in errors.items() if value is None), "AAE"),
        tuple(row.name for row in rows if not row.labels),
        interval,
    )


def _of_class(
    name: str, record: ClassRecord, rules: DetectionRules, velocities_known: bool
) -> ClassMetrics:
    labels = int(record.labels.sum())
    counts = labels > 0 or rules.absent == "zero"
    precision = {
        distance: curve(hits, record.scores, labels).precision
        for distance, hits in zip(rules.distances, record.hits.T, strict=True)
    }
    aps = {d: average_precision(p, rules) if counts else None for d, p in precision.items()}
    best = record.hits[:, rules.distances.index(rules.error_distance)]
    means = mean_errors(record.errors, best, record.scores, labels, rules)
    left_out = set(undefined_errors(name)) | (set() if velocities_known else {"AVE"})
    errors = {
        error: float(value) if counts and error not in left_out else None
        for error, value in zip(ERRORS, means, strict=True)
    }
    bev = {
        overlap: (bev_average_precision(hits, labels) if labels else 0.0) if counts else None
        for overlap, hits in zip(rules.overlaps, record.overlap_hits.T, strict=True)
    }
    return ClassMetrics(
        name, labels, len(record.scores), aps, _mean(aps.values()), errors, bev, precision
    )


def _mean(values: Sequence[float | None] | Any) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
