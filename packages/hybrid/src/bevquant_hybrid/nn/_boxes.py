"""Boxes of detectors: from anchors to pixels, cut to the image, the best of those that overlap.

A box is ``(x1, y1, x2, y2)`` in pixels, x2 − x1 wide and y2 − y1 high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LARGEST = math.log(1000 / 16)  # what Detectron and torchvision let a side grow by


def of_each_anchor(maps: Tensor, anchors: int) -> Tensor:
    """``[N, anchors · k, H, W]`` as ``[N, H · W · anchors, k]``: row, column, then anchor."""
    batch, channels, height, width = maps.shape
    split = maps.reshape(batch, anchors, channels // anchors, height, width)
    return split.permute(0, 3, 4, 1, 2).reshape(batch, -1, channels // anchors)


def decoded(anchors: Tensor, deltas: Tensor, absolute: bool = False) -> Tensor:
    r"""Boxes that regressions (dx, dy, dw, dh) make of anchors.

    :math:`x = x_a + d_x w_a,\; y = y_a + d_y h_a,\; w = w_a e^{d_w},\; h = h_a e^{d_h}` of centres
    and sides (Girshick et al., R-CNN, 2014, appendix C); dw and dh are cut at log(1000/16).

    Args:
        anchors: ``[…, 4]``.
        deltas: ``[…, 4]``.
        absolute: dx and dy are pixels: x = x_a + dx, y = y_a + dy.
    """
    low, high = anchors[..., :2], anchors[..., 2:]
    size = high - low
    moved = deltas[..., :2] if absolute else deltas[..., :2] * size
    centre = (low + high) / 2 + moved
    half = size * deltas[..., 2:].clamp(max=_LARGEST).exp() / 2
    return torch.cat([centre - half, centre + half], -1)


def clipped(boxes: Tensor, image_size: Sequence[float]) -> Tensor:
    """Corners cut to 0 … width and 0 … height of an image ``(height, width)``."""
    height, width = (float(side) for side in image_size)
    zero = boxes.new_zeros(4)
    return boxes.clamp(min=zero, max=boxes.new_tensor([width, height, width, height]))


def wide_and_high_enough(boxes: Tensor, height: float, width: float) -> Tensor:
    """Which of boxes ``[n, 4]`` have at least these sides."""
    sides = boxes[:, 2:] - boxes[:, :2]
    return (sides[:, 0] >= width) & (sides[:, 1] >= height)


def best(scores: Tensor, count: int | None) -> Tensor:
    """Indices of the highest scores, highest first; of equals the first. None: all of them."""
    return torch.sort(scores, descending=True, stable=True).indices[:count]


def _overlaps(box: Tensor, boxes: Tensor) -> Tensor:
    """Intersection over union of one box with others ``[n, 4]``; 0 where nothing is covered."""
    low, high = torch.maximum(box[:2], boxes[:, :2]), torch.minimum(box[2:], boxes[:, 2:])
    shared = (high - low).clamp(min=0).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)
    union = (box[2:] - box[:2]).clamp(min=0).prod() + areas - shared
    return torch.where(union > 0, shared / union, torch.zeros_like(shared))


def survivors(
    boxes: Tensor, scores: Tensor, classes: Tensor, iou_threshold: float, margin: float
) -> Tensor:
    """Non-maximum suppression within classes, from the highest score down.

    A kept box suppresses one behind it of the same class where their intersection over union is
    above the threshold and its own score is higher by more than the margin.

    Args:
        boxes: ``[n, 4]``.
        scores: ``[n]``.
        classes: ``[n]``.
        iou_threshold: Overlap that is allowed.
        margin: How much higher the score must be; below 0 for any score that is not lower.

    Returns:
        Indices of what is kept, highest score first; of equals the first.
    """
    order = best(scores, None)
    boxes, scores, classes = boxes[order], scores[order], classes[order]
    alive = torch.ones(len(order), dtype=torch.bool, device=boxes.device)
    for i in range(len(order)):
        if not alive[i]:
            continue
        behind = slice(i + 1, None)
        above = scores[i] - scores[behind] > margin
        covered = _overlaps(boxes[i], boxes[behind]) > iou_threshold
        alive[behind] &= ~(above & covered & (classes[behind] == classes[i]))
    return order[alive]
