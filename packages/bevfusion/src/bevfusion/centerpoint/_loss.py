"""The loss of a CenterHead for a batch of labelled frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bev_data import InputError
from bevfusion.centerpoint._config import CenterHeadConfig
from bevfusion.training import (
    BOX_WEIGHT,
    Objective,
    Targets,
    code_weights,
    gaussian_focal_loss,
    heatmap_target,
    l1_loss,
)


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
    weights = code_weights(config.cell_size)[: wanted.shape[1]].to(maps)
    return l1_loss(predicted, wanted, weights) / max(1, len(wanted))
