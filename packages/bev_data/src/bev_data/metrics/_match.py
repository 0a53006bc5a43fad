"""Which boxes of a frame count, which detection takes which label, and how far off it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError
from bev_data.boxes import in_box, rotated_iou
from bev_data.metrics._rules import ERRORS

if TYPE_CHECKING:
    from bev_data.boxes import Detections
    from bev_data.metrics._rules import DetectionRules
    from bev_data.points import Labels

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


# Which boxes of a frame count, as arrays in float64.

Region = Callable[[Floats], npt.NDArray[np.bool_]]
"""Of boxes [n, 7], which lie where a frame is labelled, bool [n]."""


class Counted(NamedTuple):
    """Boxes that count.

    Attributes:
        boxes: float64 [n, 7], as in `points.Labels`.
        kinds: int64 [n], numbers of the classes.
        velocities: float64 [n, 2] [m/s]; NaN where not known.
        scores: float64 [n]; of labels all 0.
    """

    boxes: Floats
    kinds: npt.NDArray[np.int64]
    velocities: Floats
    scores: Floats

    def where(self, kept: npt.NDArray[np.bool_]) -> Counted:
        """Those rows alone."""
        return Counted(self.boxes[kept], self.kinds[kept], self.velocities[kept], self.scores[kept])


def counted_detections(
    found: Detections,
    labels: Labels,
    classes: Sequence[str],
    rules: DetectionRules,
    region: Region | None = None,
) -> Counted:
    """Detections of a frame that the rules count.

    Args:
        found: The detections.
        labels: The frame's labels, for the rules' racks.
        classes: Their class names, by number.
        rules: Evaluation rules.
        region: Labelled region; None for everywhere.

    Raises:
        InputError: NaN or infinity, a negative size, an unknown class, or arrays that do not fit.
    """
    count = len(found.boxes)
    boxes = _array("detections.boxes", found.boxes, (count, 7))
    scores = _array("detections.scores", found.scores, (count,))
    velocities = _array("detections.velocities", found.velocities, (count, 2))
    kinds = np.asarray(found.labels)
    if kinds.shape != (count,):
        raise InputError(f"detections.labels must be [{count}], not {list(kinds.shape)}")
    if count and not (np.issubdtype(kinds.dtype, np.integer) and 0 <= kinds.min()):
        raise InputError("detections.labels must be class numbers from 0")
    if count and kinds.max() >= len(classes):
        raise InputError(
            f"detections.labels go up to {kinds.max()}, but there are {len(classes)} classes: hand "
            "over the classes of the model that found them"
        )
    for what, values in (("boxes", boxes), ("scores", scores), ("velocities", velocities)):
        _finite(f"detections.{what}", values)
    _sizes("detections.boxes", boxes)
    rows = Counted(boxes, kinds.astype(np.int64), velocities, scores)
    return rows.where(_in_place(rows, labels, classes, rules, region))


def counted_labels(
    labels: Labels,
    classes: Sequence[str],
    rules: DetectionRules,
    region: Region | None = None,
) -> Counted:
    """The labels of a frame that count: of these classes, in range, with points inside.

    Raises:
        InputError: Boxes with NaN or infinity, or arrays that do not fit.
    """
    count = len(labels.names)
    boxes = _array("labels.boxes", labels.boxes, (count, 7))
    _finite("labels.boxes", boxes)
    _sizes("labels.boxes", boxes)
    velocities = np.full((count, 2), np.nan)
    if labels.velocities is not None:
        velocities = _array("labels.velocities", labels.velocities, (count, 2))
    numbers = {name: number for number, name in enumerate(classes)}
    kinds = np.array([numbers.get(name, -1) for name in labels.names], np.int64)
    kept = kinds >= 0
    if labels.num_points is not None:
        kept &= labels.num_points >= rules.min_points
    rows = Counted(boxes, kinds, velocities, np.zeros(count)).where(kept)
    return rows.where(_in_place(rows, labels, classes, rules, region))


def _in_place(
    rows: Counted,
    labels: Labels,
    classes: Sequence[str],
    rules: DetectionRules,
    region: Region | None,
) -> npt.NDArray[np.bool_]:
    reach = np.array([rules.reach(name) for name in classes])
    x, y = rows.boxes[:, 0], rows.boxes[:, 1]
    far = np.sqrt((x - rules.origin[0]) ** 2 + (y - rules.origin[1]) ** 2)
    kept: npt.NDArray[np.bool_] = far < reach[rows.kinds]
    if rules.extent is not None:
        low_x, low_y, high_x, high_y = rules.extent
        kept &= (low_x <= x) & (x <= high_x) & (low_y <= y) & (y <= high_y)
    for rack, name in zip(labels.boxes, labels.names, strict=True):
        held = [classes.index(n) for n in rules.racks.get(name, ()) if n in classes]
        if held:
            kept &= ~(np.isin(rows.kinds, held) & in_box(rows.boxes, rack))
    if region is not None and len(rows.boxes):
        kept &= region(rows.boxes)
    return kept


def _array(what: str, values: npt.ArrayLike, shape: tuple[int, ...]) -> Floats:
    array = np.asarray(values, np.float64)
    if array.shape != shape:
        raise InputError(f"{what} must be {list(shape)}, not {list(array.shape)}")
    return array


def _finite(what: str, values: Floats) -> None:
    wrong = np.flatnonzero(~np.isfinite(values).all(axis=tuple(range(1, values.ndim))))
    if len(wrong):
        raise InputError(
            f"{what}: {len(wrong)} of {len(values)} rows hold NaN or infinity, the first is row "
            f"{wrong[0]}: {values[wrong[0]].tolist()}; drop such rows, or find out where they come "
            "from"
        )


def _sizes(what: str, boxes: Floats) -> None:
    wrong = np.flatnonzero((boxes[:, 3:6] < 0).any(axis=1))
    if len(wrong):
        raise InputError(
            f"{what}: row {wrong[0]} has a negative size: {boxes[wrong[0], 3:6].tolist()}"
        )
