"""From the head's outputs to boxes in metres, and non-maximum suppression among them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bev_data import InputError
from bev_data.boxes import Detections, checked_boxes, rotated_iou
from bevfusion.model.head._config import BRANCHES, HeadConfig

_LOG = logging.getLogger(__name__)
Floats = npt.NDArray[np.float64]


def decode(
    outputs: Mapping[str, Tensor], config: HeadConfig, *, score_threshold: float | None = None
) -> list[Detections]:
    """Boxes from the outputs of `TransFusionHead`: mit-bevfusion's TransFusionBBoxCoder.

    With c the query's class and o the map's origin: score = σ(heatmap_c) · query_heatmap_score_c,
    x = center_0 · cell + o, size = e^dim, z = height − size_z / 2; z = height where
    `HeadConfig.height` is "centre".

    mmdetection3d 0.x, on which mit-bevfusion stands, holds boxes as x, y, z, width, length, height
    and a yaw a; nuScenes' yaw is −a − π/2 (`output_to_nusc_box`), so that sin yaw = −cos a and
    cos yaw = −sin a. Its boxes stand on z. mit-bevfusion, however, puts the centre of nuScenes'
    boxes there (`NuScenesDataset.get_ann_info`, origin (0.5, 0.5, 0)), so that its `height` is the
    top of a box and z, half a box lower, the centre; its tools/visualize.py takes off another half
    to find the bottom.

    Args:
        outputs: From the head; other entries than those named in its forward are not read.
        config: Of the head.
        score_threshold: In place of the configuration's.

    Returns:
        One per frame. Boxes with a score above the threshold and the centre inside
        `post_center_range`, after non-maximum suppression where the configuration wants it. Boxes
        that hold NaN or infinity are dropped, and their number is logged as a warning.

    Raises:
        InputError: Outputs are missing or do not fit each other.
    """
    threshold = config.score_threshold if score_threshold is None else score_threshold
    values = {name: _array(outputs, name) for name in (*BRANCHES, "heatmap", "query_heatmap_score")}
    labels = _array(outputs, "query_labels").astype(np.int64)
    _check(values, labels, config)
    found = []
    for frame in range(len(labels)):
        rows = {name: array[frame] for name, array in values.items()}
        found.append(_decode_frame(rows, labels[frame], config, threshold))
    return found


def _decode_frame(
    rows: dict[str, Floats], labels: npt.NDArray[np.int64], config: HeadConfig,
    threshold: float,
) -> Detections:  # fmt: skip
    query = np.arange(len(labels))
    with np.errstate(over="ignore", invalid="ignore"):  # answered by the test for finite values
        scores = rows["query_heatmap_score"][labels, query] / (
            1.0 + np.exp(-rows["heatmap"][labels, query])
        )
        boxes = _boxes(rows, config)
    velocities = rows["vel"].T
    kept = valid_rows(boxes, velocities, scores, config.post_center_range, threshold)
    kept = kept[_suppress(boxes[kept], scores[kept], labels[kept], config)]
    return Detections.of_rows(kept, boxes, scores, labels, velocities)


def valid_rows(
    boxes: Floats,
    velocities: Floats,
    scores: Floats,
    center_range: Sequence[float],
    threshold: float,
) -> npt.NDArray[np.int64]:
    """Rows of finite boxes with the centre in range and a score above the threshold, best first.

    Args:
        boxes: [n, 7], the centre first.
        velocities: [n, 2].
        scores: [n].
        center_range: Low x, y, z, then high x, y, z [m].
        threshold: A score must be above it.
    """
    finite = np.isfinite(boxes).all(1) & np.isfinite(velocities).all(1) & np.isfinite(scores)
    if not finite.all():
        _LOG.warning(
            "%d of %d boxes of a frame hold NaN or infinity and are dropped; look for NaN in the "
            "head's input or weights", int((~finite).sum()), len(finite),
        )  # fmt: skip
    low, high = center_range[:3], center_range[3:]
    inside = (boxes[:, :3] >= low).all(1) & (boxes[:, :3] <= high).all(1)
    kept = np.flatnonzero(finite & inside & (scores > threshold))
    return kept[np.argsort(-scores[kept], kind="stable")]


def _boxes(rows: dict[str, Floats], config: HeadConfig) -> Floats:
    """float64 [queries, 7] in this package's convention."""
    center, dim, rot = rows["center"], rows["dim"], rows["rot"]
    width, length, height = np.exp(dim)
    return np.stack(
        [
            center[0] * config.cell_size[0] + config.origin[0],
            center[1] * config.cell_size[1] + config.origin[1],
            rows["height"][0] - height * config.center_drop,
            length,
            width,
            height,
            np.arctan2(-rot[1], -rot[0]),
        ],
        axis=1,
    )


def _suppress(
    boxes: Floats, scores: Floats, labels: npt.NDArray[np.int64], config: HeadConfig
) -> npt.NDArray[np.int64]:
    """Rows that stay, in order."""
    stays = np.ones(len(boxes), bool)
    if config.nms != "none":
        for name in config.nms_classes:
            rows = np.flatnonzero(labels == config.classes.index(name))
            if config.nms == "circle":
                best = circle_nms(boxes[rows, :2], scores[rows], config.nms_radius)
            else:
                best = rotated_nms(boxes[rows], scores[rows], config.nms_iou)
            stays[rows] = False
            stays[rows[best]] = True
    return np.flatnonzero(stays)


def _array(outputs: Mapping[str, Tensor], name: str) -> Floats:
    if name not in outputs:
        raise InputError(
            f"decode: the outputs have no {name!r}, only {', '.join(outputs)}; hand over what "
            "TransFusionHead returned"
        )
    array: Floats = outputs[name].detach().double().cpu().numpy()
    return array


def _check(values: dict[str, Floats], labels: npt.NDArray[np.int64], config: HeadConfig) -> None:
    if labels.ndim != 2:
        raise InputError(f"decode: query_labels must be [batch, queries], not {list(labels.shape)}")
    batch, queries = labels.shape
    rows = {**BRANCHES, "heatmap": config.num_classes, "query_heatmap_score": config.num_classes}
    for name, array in values.items():
        if array.shape != (batch, rows[name], queries):
            raise InputError(
                f"decode: {name} must be [{batch}, {rows[name]}, {queries}] as query_labels and "
                f"the configuration have it, not {list(array.shape)}"
            )
    if labels.size and not 0 <= labels.min() <= labels.max() < config.num_classes:
        raise InputError(
            f"decode: query_labels must lie from 0 to {config.num_classes - 1}, not from "
            f"{labels.min()} to {labels.max()}"
        )


def circle_nms(
    centers: npt.ArrayLike, scores: npt.ArrayLike, radius: float
) -> npt.NDArray[np.int64]:
    """Of objects whose centres are no farther than `radius` apart, keep the best.

    Greedy: the best score is kept and suppresses those near it, then the best of the rest. Of
    equal scores the earlier row counts as better.

    Args:
        centers: [n, 2], x and y [m].
        scores: [n].
        radius: In metres, not squared.

    Returns:
        Rows that stay, best first.

    Raises:
        InputError: NaN, infinity, or shapes that do not fit.

    Example:
        >>> circle_nms([[0, 0], [0.3, 0], [5, 0]], [0.5, 0.9, 0.1], radius=0.4)
        array([1, 2])
    """
    points = np.asarray(centers, np.float64).reshape(-1, 2)
    finite = np.isfinite(points).all(1)
    if not finite.all():
        raise InputError(
            f"circle_nms: the centres of rows {np.flatnonzero(~finite).tolist()} hold NaN or "
            "infinity; drop these rows first"
        )
    order = _best_first("circle_nms", scores, len(points))
    offset = points[order][:, None] - points[order][None]
    near = np.hypot(offset[..., 0], offset[..., 1]) <= radius
    return order[greedy_nms(near)]


def rotated_nms(
    boxes: npt.ArrayLike, scores: npt.ArrayLike, threshold: float
) -> npt.NDArray[np.int64]:
    """Of boxes that overlap by more than `threshold`, keep the best; see `circle_nms`.

    Args:
        boxes: [n, 7], as in `Detections`; height and z do not count.
        scores: [n].
        threshold: Intersection over union in the bird's-eye view, from 0 to 1. Boxes of no area
            overlap with nothing.

    Returns:
        Rows that stay, best first.

    Raises:
        InputError: NaN, infinity, negative sizes, or shapes that do not fit.

    Example:
        >>> car, same = [0, 0, 0, 4, 2, 1.5, 0], [0, 0, 0, 4, 2, 1.5, 3.1415927]
        >>> rotated_nms([car, same], [0.5, 0.9], threshold=0.2)
        array([1])
    """
    rows = checked_boxes("rotated_nms", boxes)
    order = _best_first("rotated_nms", scores, len(rows))
    return order[greedy_nms(rotated_iou(rows[order], rows[order]) > threshold)]


def _best_first(what: str, scores: npt.ArrayLike, count: int) -> npt.NDArray[np.int64]:
    values = np.asarray(scores, np.float64)
    if values.shape != (count,):
        raise InputError(f"{what}: {count} rows need as many scores, not {list(values.shape)}")
    if np.isnan(values).any():
        raise InputError(
            f"{what}: the scores of rows {np.flatnonzero(np.isnan(values)).tolist()} are NaN; "
            "drop these rows first"
        )
    return np.argsort(-values, kind="stable").astype(np.int64)


def greedy_nms(near: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Rows that no better kept row is near to.

    Args:
        near: [n, n], rows and columns in the order of their scores, best first.
    """
    suppressed = np.zeros(len(near), bool)
    kept = []
    for row in range(len(near)):
        if not suppressed[row]:
            kept.append(row)
            suppressed |= near[row]
    return np.array(kept, np.int64)
