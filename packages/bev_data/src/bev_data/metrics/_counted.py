"""Which boxes of a frame count, as arrays in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from bev_data._errors import InputError

if TYPE_CHECKING:
    from bev_data.boxes import Detections
    from bev_data.metrics._rules import DetectionRules
    from bev_data.points import Labels

Floats = npt.NDArray[np.float64]
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
            kept &= ~(np.isin(rows.kinds, held) & _inside(rows.boxes, rack))
    if region is not None and len(rows.boxes):
        kept &= region(rows.boxes)
    return kept


def _inside(boxes: Floats, around: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Whether the centres lie in a box, its faces included."""
    cx, cy, cz, length, width, height, yaw = around.astype(np.float64)
    x, y, z = (boxes[:, :3] - [cx, cy, cz]).T
    c, s = np.cos(yaw), np.sin(yaw)
    along, across = np.abs(x * c + y * s), np.abs(y * c - x * s)
    inside: npt.NDArray[np.bool_] = (
        (along <= length / 2) & (across <= width / 2) & (np.abs(z) <= height / 2)
    )
    return inside


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
