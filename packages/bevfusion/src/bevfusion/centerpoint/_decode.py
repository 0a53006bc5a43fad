"""Maps of a CenterHead to boxes, and the loss of the maps by labelled boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bev_data import InputError
from bev_data.boxes import Detections
from bevfusion.centerpoint._config import CenterHeadConfig
from bevfusion.model.head import circle_nms, local_maxima, rotated_nms, valid_rows
from bevfusion.training import (
    BOX_WEIGHT,
    Objective,
    Targets,
    code_weights,
    gaussian_focal_loss,
    heatmap_target,
    l1_loss,
)

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
    return Detections.of_rows(kept, boxes, scores, labels, velocities)


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


class CenterLoss(NamedTuple):
    """The terms of the loss, each a tensor with a single number.

    Attributes:
        heatmap: Gaussian focal loss per object, summed over the tasks.
        boxes: 0.25 · the L1 distance of the codes per object, summed over the tasks.
    """

    heatmap: Tensor
    boxes: Tensor

    @property
    def total(self) -> Tensor:
        """The minimised sum of both."""
        return self.heatmap + self.boxes


def center_loss(
    outputs: Mapping[str, Tensor], targets: Sequence[Targets], config: CenterHeadConfig
) -> CenterLoss:
    """CenterPoint's loss as mmdetection3d trains it.

    L = Σ over tasks of L_heatmap / N + 0.25 · L_box / M, with N the task's heatmap cells that are 1
    and M its objects in the batch, each at least 1. L_heatmap is the Gaussian focal loss; L_box the
    L1 distance between the branches at the object's cell and its code: place in the cell, z of the
    centre, ln of length, width and height, sine and cosine of the yaw, and the velocity, which
    weighs 0.2. A centre's error counts per 0.6 m, at every cell size. Heatmap targets are those of
    `bevfusion.training.heatmap_target`.

    Args:
        outputs: From `CenterHead`, with gradient.
        targets: One for each frame of the batch.
        config: Of the head.

    Raises:
        InputError: Another number of frames.

    Example:
        >>> import numpy as np
        >>> from bevfusion.centerpoint import CenterHead, CenterHeadConfig, center_loss
        >>> config = CenterHeadConfig(in_channels=4, map_size=(9, 9))
        >>> outputs = CenterHead(config)(torch.zeros(1, 4, 9, 9))
        >>> box = np.array([[-52, -52, 0, 4, 2, 1.5, 0]], np.float32)
        >>> car = Targets(box, np.zeros((1, 2), np.float32), np.array([0]))
        >>> loss = center_loss(outputs, [car], config)
        >>> loss.total.backward()
        >>> bool(loss.boxes > 0)
        True
    """
    if len(outputs["heatmap_0"]) != len(targets):
        raise InputError(
            f"center_loss: outputs of {len(outputs['heatmap_0'])} frames, targets of {len(targets)}"
        )
    # Maps are [y, x].
    heatmaps = np.stack([heatmap_target(t, config).transpose(0, 2, 1) for t in targets])
    objects = _Objects.of(targets, config)
    heat, boxes, offset = [], [], 0
    for task, classes in enumerate(config.tasks):
        logits = outputs[f"heatmap_{task}"]
        wanted = torch.from_numpy(heatmaps[:, offset : offset + len(classes)]).to(logits)
        heat.append(gaussian_focal_loss(logits, wanted) / max(1, int((wanted == 1).sum())))
        chosen = (objects.labels >= offset) & (objects.labels < offset + len(classes))
        boxes.append(_box_loss(outputs, task, objects.take(chosen), config))
        offset += len(classes)
    return CenterLoss(torch.stack(heat).sum(), BOX_WEIGHT * torch.stack(boxes).sum())


CENTER_OBJECTIVE = Objective(center_loss, ("heatmap", "box"))
"""What `bevfusion.training.DetectorTrainer` trains a CenterPoint by."""


class _Objects(NamedTuple):
    """All objects of a batch: frame, row and column of the cell, class and code."""

    frames: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    labels: np.ndarray
    codes: np.ndarray

    @classmethod
    def of(cls, targets: Sequence[Targets], config: CenterHeadConfig) -> _Objects:
        counts = [len(t) for t in targets]
        boxes, velocities, labels = (
            np.concatenate([getattr(t, name) for t in targets])
            for name in ("boxes", "velocities", "classes")
        )
        boxes = boxes.astype(np.float64)
        places = (boxes[:, :2] - config.origin) / config.cell_size
        cells = np.floor(places).astype(np.int64)
        yaw = boxes[:, 6:7]
        code = {
            "reg": places - cells, "height": boxes[:, 2:3], "dim": np.log(boxes[:, 3:6]),
            "rot": np.concatenate([np.sin(yaw), np.cos(yaw)], 1), "vel": velocities,
        }  # fmt: skip
        codes = np.concatenate([code[name] for name, _ in config.branches], 1)
        frames = np.repeat(np.arange(len(targets)), counts)
        return cls(frames, cells[:, 1], cells[:, 0], labels, codes.astype(np.float32))

    def take(self, chosen: np.ndarray) -> _Objects:
        return _Objects(*(column[chosen] for column in self))


def _box_loss(
    outputs: Mapping[str, Tensor], task: int, objects: _Objects, config: CenterHeadConfig
) -> Tensor:
    maps = torch.cat([outputs[f"{name}_{task}"] for name, _ in config.branches], 1)
    where = [torch.from_numpy(part).to(maps.device) for part in objects[:3]]
    predicted = maps[where[0], :, where[1], where[2]]
    wanted = torch.from_numpy(objects.codes).to(maps)
    # Without a branch of velocities the code is shorter.
    weights = code_weights(config.cell_size)[: wanted.shape[1]].to(maps)
    return l1_loss(predicted, wanted, weights) / max(1, len(wanted))
