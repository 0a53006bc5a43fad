"""Precision over recall from hits in the order of scores, and derived figures."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bev_data.metrics._rules import DetectionRules

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

RECALLS: Floats = np.linspace(0, 1, 101)
"""Recalls at which nuScenes reads the curve."""
POINTS = 40  # of KITTI's curve


class Curve(NamedTuple):
    """Precision and score at each of `RECALLS`, float64 [101]; 0 beyond the largest recall."""

    precision: Floats
    scores: Floats


def curve(hits: Bools, scores: Floats, labels: int) -> Curve:
    """The precision-recall curve as nuscenes-devkit's `accumulate` reads it.

    After n detections, precision = hits / n and recall = hits / labels; between two recalls the
    curve is linear, and at a recall that several n have, the last one counts.

    Args:
        hits: bool [n], whether each detection took a label, best score first.
        scores: float64 [n], falling.
        labels: How many labels there are.
    """
    if not labels or not hits.any():
        return Curve(np.zeros(len(RECALLS)), np.zeros(len(RECALLS)))
    right = np.cumsum(hits).astype(np.float64)
    recall = right / float(labels)
    precision = right / np.arange(1, len(hits) + 1)
    return Curve(
        np.interp(RECALLS, recall, precision, right=0),
        np.interp(RECALLS, recall, scores, right=0),
    )


def average_precision(precision: Floats, rules: DetectionRules) -> float:
    """Mean over recalls r > r₀ of max(p(r) − p₀, 0) / (1 − p₀), as nuscenes-devkit's `calc_ap`.

    Args:
        precision: float64 [101] at `RECALLS`.
        rules: r₀ is `min_recall`, p₀ `min_precision`.
    """
    counted = np.maximum(precision[first_recall(rules) :] - rules.min_precision, 0)
    # Divided one by one, so that a perfect curve gives 1 and not 1 + 4e-16.
    return float((counted / (1.0 - rules.min_precision)).mean())


def mean_errors(errors: Floats, hits: Bools, scores: Floats, labels: int, rules: DetectionRules
) -> Floats:  # fmt: skip
    """Errors of true positives, averaged over recalls as nuscenes-devkit's `calc_tp` does.

    At each recall the error is the mean over all true positives down to the score there (linear
    between scores, unknown ones left out); the result is its mean over recalls above `min_recall`
    up to the largest one, 1 where that is not reached or no error is known.

    Args:
        errors: float64 [true positives, columns], best score first; NaN where not known.
        hits: bool [n], which of the detections are the true positives.
        scores: float64 [n], falling.
        labels: How many labels there are.
        rules: Gives `min_recall`.

    Returns:
        float64 [columns].
    """
    result = np.ones(errors.shape[1])
    at = curve(hits, scores, labels).scores
    reached = np.flatnonzero(at)
    first, last = first_recall(rules), int(reached[-1]) if len(reached) else 0
    if last < first:
        return result
    for column, values in enumerate(errors.T):
        known = ~np.isnan(values)
        if known.any():
            sums, counts = np.nancumsum(values), np.cumsum(known)
            means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts != 0)
            along = np.interp(at[::-1], scores[hits][::-1], means[::-1])[::-1]
            result[column] = along[first : last + 1].mean()
    return result


def bev_average_precision(hits: Bools, labels: int) -> float:
    """KITTI's AP over 40 recalls: 1/40 · Σ over k = 1 … 40 of max over recalls ≥ k/40 of p.

    Simonelli et al., Disentangling Monocular 3D Object Detection (2019), section 6.2. Recall 0,
    which one lucky detection fills, is not among them.

    Args:
        hits: bool [n], best score first.
        labels: How many labels there are, at least 1.
    """
    if not len(hits):
        return 0.0
    right = np.cumsum(hits)
    precision = right / np.arange(1, len(hits) + 1)
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    # The first n with right / labels ≥ k / 40, in whole numbers so that no rounding decides.
    first = np.searchsorted(right * POINTS, np.arange(1, POINTS + 1) * labels)
    return float(np.append(best_from_here, 0.0)[first].sum()) / POINTS


def first_recall(rules: DetectionRules) -> int:
    """The first of `RECALLS` that counts: the one behind `min_recall`."""
    return round(100 * rules.min_recall) + 1
