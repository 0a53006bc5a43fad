"""Which detection takes which label, and how far off the ones that took one are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import numpy.typing as npt

from bev_data.boxes import rotated_iou
from bev_data.metrics._rules import ERRORS

if TYPE_CHECKING:
    from bev_data.metrics._counted import Counted
    from bev_data.metrics._rules import DetectionRules

Floats = npt.NDArray[np.float64]
Taken = npt.NDArray[np.int64]

# What cannot be told of some classes, as in nuScenes: a cone looks the same from everywhere.
_UNDEFINED = {"traffic_cone": ("AOE", "AVE"), "barrier": ("AVE",)}


def by_distance(found: Counted, labels: Counted, rules: DetectionRules) -> Taken:
    """The label that each detection takes at each of `rules.distances`.

    The best-scored detection chooses first, and each takes the nearest label of its class that is
    still free, if it is nearer than the limit; of equally near ones the first. Of equal scores the
    later row chooses first, as in nuscenes-devkit's `accumulate`.

    Returns:
        int64 [distances, detections], rows of `labels`; −1 for none.
    """
    apart = found.boxes[:, None, :2] - labels.boxes[None, :, :2]
    far = np.sqrt((apart * apart).sum(axis=2))
    return _taken(far, found, labels, rules.distances)


def by_overlap(found: Counted, labels: Counted, rules: DetectionRules) -> Taken:
    """The label that each detection takes at each of `rules.overlaps`, the largest overlap first.

    Returns:
        int64 [overlaps, detections], rows of `labels`; −1 for none.
    """
    overlap = rotated_iou(found.boxes, labels.boxes)
    return _taken(-overlap, found, labels, [-least for least in rules.overlaps])


def true_positive_errors(
    found: Counted, labels: Counted, taken: Taken, classes: Sequence[str]
) -> Floats:
    """Errors of the detections that took a label, in the order of the detections.

    With d the detection and l its label: ATE = √(Δx² + Δy²) [m]; ASE = 1 − the intersection over
    union of the two boxes laid over each other, centres and yaws the same; AOE = the smallest angle
    between the yaws, from 0 to π, of barriers to π/2 [rad]; AVE = √(Δvx² + Δvy²) [m/s]. As in
    nuScenes' detection task.

    Args:
        found: Detections.
        labels: Labels.
        taken: int64 [detections], from `by_distance`.
        classes: Class names, by number.

    Returns:
        float64 [taken ones, 4] in the order of `ERRORS`; NaN where a class has no such error or
        the label's velocity is not known.
    """
    rows = np.flatnonzero(taken >= 0)
    a, b = found.boxes[rows], labels.boxes[taken[rows]]
    shift = a[:, :2] - b[:, :2]
    common = np.minimum(a[:, 3:6], b[:, 3:6]).prod(axis=1)
    union = a[:, 3:6].prod(axis=1) + b[:, 3:6].prod(axis=1) - common
    names = [classes[kind] for kind in found.kinds[rows]]
    period = np.array([np.pi if name == "barrier" else 2 * np.pi for name in names])
    turn = np.abs((b[:, 6] - a[:, 6] + period / 2) % period - period / 2)
    speed = found.velocities[rows] - labels.velocities[taken[rows]]
    errors = np.stack(
        [
            np.sqrt((shift * shift).sum(axis=1)),
            1 - np.divide(common, union, out=np.zeros_like(common), where=union > 0),
            turn,
            np.sqrt((speed * speed).sum(axis=1)),
        ],
        axis=1,
    )
    for row, name in enumerate(names):
        for error in _UNDEFINED.get(name, ()):
            errors[row, ERRORS.index(error)] = np.nan
    return errors


def undefined_errors(name: str) -> tuple[str, ...]:
    """The errors that a class does not have."""
    return _UNDEFINED.get(name, ())


def _taken(cost: Floats, found: Counted, labels: Counted, limits: Sequence[float]) -> Taken:
    cost = np.where(found.kinds[:, None] == labels.kinds[None], cost, np.inf)
    order = np.argsort(found.scores, kind="stable")[::-1]
    chosen = np.full((len(limits), len(cost)), -1, np.int64)
    if cost.size:
        chosen[:, order] = _choose(np.ascontiguousarray(cost[order]), np.array(limits, np.float64))
    return chosen


@numba.njit(cache=True)
def _choose(cost: Any, limits: Any) -> Any:
    """Row after row takes the cheapest free column below the limit; of equal ones the first."""
    rows, columns = cost.shape
    chosen = np.full((len(limits), rows), -1, np.int64)
    for k in range(len(limits)):
        free = np.ones(columns, np.bool_)
        for row in range(rows):
            least, best = np.inf, -1
            for column in range(columns):
                if free[column] and cost[row, column] < least:
                    least, best = cost[row, column], column
            if least < limits[k]:
                chosen[k, row] = best
                free[best] = False
    return chosen
