"""The steps of `DetectionPostProcess`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid._torch_operator import operator
from bevquant_hybrid.nn._boxes import (
    best,
    clipped,
    decoded,
    of_each_anchor,
    survivors,
    wide_and_high_enough,
)

__all__ = ["detect"]

_Found = tuple[Tensor, Tensor, Tensor]  # boxes, scores, classes


@operator(
    "(Tensor[] boxes, Tensor[] scores, Tensor[] regressions, Tensor? image_shapes, "
    "float score_threshold, float[]? regression_scale, int? background_class_idx, "
    "float? size_threshold, int[]? image_size, int? pre_decode_top_n, int? post_decode_top_n, "
    "float? iou_threshold, int? pre_nms_top_n, int? post_nms_top_n, bool nms_on_each_level, "
    "str mode) -> Tensor[]"
)
def detect(
    boxes: Sequence[Tensor],
    scores: Sequence[Tensor],
    regressions: Sequence[Tensor],
    image_shapes: Tensor | None,
    score_threshold: float,
    regression_scale: Sequence[float] | None,
    background_class_idx: int | None,
    size_threshold: float | None,
    image_size: Sequence[int] | None,
    pre_decode_top_n: int | None,
    post_decode_top_n: int | None,
    iou_threshold: float | None,
    pre_nms_top_n: int | None,
    post_nms_top_n: int | None,
    nms_on_each_level: bool,
    mode: str,
) -> list[Tensor]:
    """What `DetectionPostProcess` computes: boxes of all images, then scores, then classes."""
    yolo = mode == "yolo"
    levels = [
        _level(i, *given, yolo)
        for i, given in enumerate(zip(boxes, scores, regressions, strict=True))
    ]
    images = max(len(level[1]) for level in levels)
    results: list[_Found] = []
    for image in range(images):
        sides: Any = image_size if image_shapes is None else image_shapes[image]
        joined = []
        for anchors, score, deltas in levels:
            kept = best(score[image][:, 0], pre_decode_top_n)
            found = _candidates(
                anchors[image][kept],
                score[image][kept],
                deltas[image][kept],
                score_threshold,
                regression_scale,
                background_class_idx,
                yolo,
            )
            found = _fitted(found, sides, size_threshold)
            found = _taken(found, best(found[1], post_decode_top_n))
            if nms_on_each_level:
                found = _suppressed(found, iou_threshold, pre_nms_top_n, post_nms_top_n)
            joined.append(found)
        every = tuple(torch.cat(parts) for parts in zip(*joined, strict=True))
        if nms_on_each_level:
            results.append(_taken(every, best(every[1], post_nms_top_n)))
        else:
            results.append(_suppressed(every, iou_threshold, pre_nms_top_n, post_nms_top_n))
    return [part for parts in zip(*results, strict=True) for part in parts]


def _level(number: int, boxes: Tensor, scores: Tensor, regressions: Tensor, yolo: bool) -> _Found:
    """Anchors ``[N, M, 4]``, scores ``[N, M, S]`` and regressions ``[N, M, 1 or classes, 4]``."""
    shapes = tuple(boxes.shape), tuple(scores.shape), tuple(regressions.shape)
    flat = [boxes, scores, regressions]
    if boxes.dim() == 4 and boxes.shape[1] % 4 == 0:
        anchors = boxes.shape[1] // 4
        flat = [of_each_anchor(x, anchors) for x in flat if _divides(x, anchors)]
    fits = len(flat) == 3 and all(x.dim() == 3 for x in flat) and flat[0].shape[2] == 4
    fits = fits and len({x.shape[1] for x in flat}) == 1
    classes = flat[1].shape[2] - yolo if fits else 0
    fits = fits and classes > 0 and flat[2].shape[2] in (4, 4 * classes)
    images = flat[1].shape[0] if fits else 0
    if not fits or flat[2].shape[0] != images or flat[0].shape[0] not in (1, images):
        raise ValueError(
            f"DetectionPostProcess: level {number}: boxes {shapes[0]}, scores {shapes[1]} and "
            f"regressions {shapes[2]} do not belong together: expected [N, A·4, H, W], [N, A·"
            "scores, H, W] and [N, A·4, H, W] (or four for each class), or [N, M, 4], [N, M, "
            "scores] and [N, M, 4]"
        )
    deltas = flat[2].reshape(*flat[2].shape[:2], -1, 4)
    return flat[0].expand(images, -1, -1), flat[1], deltas


def _divides(maps: Tensor, anchors: int) -> bool:
    return maps.dim() == 4 and anchors > 0 and maps.shape[1] % anchors == 0


def _candidates(
    anchors: Tensor,
    scores: Tensor,
    deltas: Tensor,
    threshold: float,
    scale: Sequence[float] | None,
    background: int | None,
    yolo: bool,
) -> _Found:
    """Boxes of all classes with a score that counts, of anchors ``[M, 4]``."""
    if scale is not None:
        deltas = deltas * deltas.new_tensor(scale)
    boxes = decoded(anchors[:, None], deltas, yolo)
    wanted = scores >= threshold
    if yolo:
        wanted = wanted[:, :1].expand(-1, scores.shape[1] - 1).clone()
        scores = scores[:, 1:] * scores[:, :1]
    if background is not None and 0 <= background < scores.shape[1]:
        wanted[:, background] = False
    box, kind = wanted.nonzero(as_tuple=True)
    boxes = boxes.expand(-1, scores.shape[1], -1)
    return boxes[box, kind], scores[box, kind], kind


def _fitted(found: _Found, sides: Any, size_threshold: float | None) -> _Found:
    boxes, scores, classes = found
    if sides is not None:
        boxes = clipped(boxes, sides)
    if size_threshold is None:
        return boxes, scores, classes
    large = wide_and_high_enough(boxes, size_threshold, size_threshold)
    return boxes[large], scores[large], classes[large]


def _taken(found: Any, which: Tensor) -> _Found:
    boxes, scores, classes = found
    return boxes[which], scores[which], classes[which]


def _suppressed(
    found: Any, iou_threshold: float | None, before: int | None, after: int | None
) -> _Found:
    found = _taken(found, best(found[1], before))
    if iou_threshold is not None:
        found = _taken(found, survivors(found[0], found[1], found[2], iou_threshold, 0.0))
    return _taken(found, best(found[1], after))
