"""From CenterHead's maps to boxes in metres, and non-maximum suppression among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bev_data import InputError
from bev_data.boxes import Detections
from bevfusion.centerpoint._config import CenterHeadConfig
from bevfusion.model.head import circle_nms, local_maxima, rotated_nms, valid_rows

Floats = npt.NDArray[np.float64]


def decode(
    outputs: Mapping[str, Tensor], config: CenterHeadConfig, *, score_threshold: float | None = None
) -> list[Detections]:
    """Boxes from the outputs of `CenterHead`: mmdetection3d's CenterPointBBoxCoder and its NMS.

    Task by task the `max_boxes` best of classes · cells become boxes. With (i, j) the cell along x
    and y, o the map's origin: score = σ(heatmap), x = (i + reg_0) · cell + o, y likewise, z =
    height, size = e^dim, yaw = atan2(rot_0, rot_1). Boxes with a score above the threshold and the
    centre inside `post_center_range` stay. Of boxes that `nms` takes for one object the best stays,
    across the classes of a task. The first `nms_boxes` of these are returned. In float64.

    Args:
        outputs: From the head; other entries than those named in its forward are not read.
        config: Of the head.
        score_threshold: In place of the configuration's.

    Returns:
        One per frame, best score first; velocities are 0 for a head without them. Boxes that hold
        NaN or infinity are dropped, and their number is logged as a warning.

    Raises:
        InputError: Outputs are missing or do not fit each other.
    """
    threshold = config.score_threshold if score_threshold is None else score_threshold
    tasks = [_task_maps(outputs, task, config) for task in range(len(config.tasks))]
    found = []
    for frame in range(len(tasks[0]["heatmap"])):
        parts = []
        offset = 0
        for task, maps in enumerate(tasks):
            one = _decode_task({n: m[frame] for n, m in maps.items()}, task, config, threshold)
            parts.append(one._replace(labels=one.labels + offset))
            offset += len(config.tasks[task])
        columns: list[Any] = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = np.argsort(-columns[1], kind="stable")
        found.append(Detections(*(column[order] for column in columns)))
    return found


def _task_maps(
    outputs: Mapping[str, Tensor], task: int, config: CenterHeadConfig
) -> dict[str, Tensor]:
    """The maps of one task in float64, on the CPU."""
    wanted = dict((*config.branches, ("heatmap", len(config.tasks[task]))))
    x, y = config.map_size
    maps = {}
    for name, channels in wanted.items():
        key = f"{name}_{task}"
        if key not in outputs:
            raise InputError(
                f"decode: the outputs have no {key!r}, only {', '.join(outputs)}; hand over what "
                "CenterHead returned"
            )
        value = outputs[key].detach().cpu().double()
        if value.shape[1:] != (channels, y, x):
            raise InputError(
                f"decode: {key} must be [batch, {channels}, {y}, {x}] (channels, y, x) as the "
                f"configuration has it, not {list(value.shape)}"
            )
        maps[name] = value
    return maps


def _decode_task(
    maps: dict[str, Tensor], task: int, config: CenterHeadConfig, threshold: float
) -> Detections:
    """Boxes of one frame, labels from 0 in the task."""
    heat = maps["heatmap"].sigmoid()
    if config.peak_kernel > 1:
        every = torch.zeros(1, len(heat), 1, 1, dtype=torch.bool)
        heat = local_maxima(heat[None], config.peak_kernel, every)[0]
    flat = heat.flatten()
    best = flat.sort(descending=True, stable=True).indices[: config.max_boxes]
    cells = heat.shape[1] * heat.shape[2]
    labels, cell = (best // cells).numpy(), best % cells
    rows = {name: value.flatten(1)[:, cell].numpy() for name, value in maps.items()}
    scores = flat[best].numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # answered by the test for finite values
        boxes = _boxes(rows, cell.numpy(), config)
    velocities = rows["vel"].T if "vel" in rows else np.zeros((len(boxes), 2))
    kept = valid_rows(boxes, velocities, scores, config.post_center_range, threshold)
    kept = kept[_suppress(boxes[kept], scores[kept], task, config)]
    return Detections(
        boxes[kept].astype(np.float32),
        scores[kept].astype(np.float32),
        labels[kept],
        velocities[kept].astype(np.float32),
    )


def _boxes(
    rows: dict[str, Floats], cell: npt.NDArray[np.int64], config: CenterHeadConfig
) -> Floats:
    j, i = np.divmod(cell, config.map_size[0])
    reg, dim, rot = rows["reg"], np.exp(rows["dim"]), rows["rot"]
    return np.stack(
        [
            (i + reg[0]) * config.cell_size[0] + config.origin[0],
            (j + reg[1]) * config.cell_size[1] + config.origin[1],
            rows["height"][0],
            *dim,
            np.arctan2(rot[0], rot[1]),
        ],
        axis=1,
    )


def _suppress(
    boxes: Floats, scores: Floats, task: int, config: CenterHeadConfig
) -> npt.NDArray[np.int64]:
    """Rows that stay, best first."""
    if config.nms == "circle":
        rows = circle_nms(boxes[:, :2], scores, config.nms_radius[task])
    elif config.nms == "rotated":
        rows = rotated_nms(boxes, scores, config.nms_iou)
    else:
        rows = np.arange(len(boxes))
    return rows[: config.nms_boxes]
