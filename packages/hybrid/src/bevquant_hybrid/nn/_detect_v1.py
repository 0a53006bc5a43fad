"""The steps of `DetectionPostProcessV1`."""

from __future__ import annotations

from collections.abc import Sequence

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

__all__ = ["detect_v1"]


@operator(
    "(Tensor[] data, Tensor[] anchors, Tensor? image_sizes, int num_classes, "
    "float box_filter_threshold, int[] class_offsets, int[] use_clippings, int[]? image_size, "
    "float nms_threshold, float nms_margin, int pre_nms_top_k, int post_nms_top_k, "
    "str? nms_padding_mode, float[] bbox_min_hw) -> Tensor[]"
)
def detect_v1(
    data: Sequence[Tensor],
    anchors: Sequence[Tensor],
    image_sizes: Tensor | None,
    num_classes: int,
    box_filter_threshold: float,
    class_offsets: Sequence[int],
    use_clippings: Sequence[int],
    image_size: Sequence[int] | None,
    nms_threshold: float,
    nms_margin: float,
    pre_nms_top_k: int,
    post_nms_top_k: int,
    nms_padding_mode: str | None,
    bbox_min_hw: Sequence[float],
) -> list[Tensor]:
    """What `DetectionPostProcessV1` computes: boxes, scores and classes of image after image."""
    _check(data, anchors, num_classes, len(class_offsets))
    if any(use_clippings) and image_size is None and image_sizes is None:
        raise ValueError(
            "DetectionPostProcessV1: use_clippings needs the size of the image; give image_size to "
            "the module or image_sizes to the call"
        )
    results: list[Tensor] = []
    for image in range(len(data[0])):
        parts = []
        for values, around, offset, clips in zip(
            data, anchors, class_offsets, use_clippings, strict=True
        ):
            count = around.shape[1] // 4
            rows = of_each_anchor(values[image : image + 1], count)[0]
            row = image if len(around) > 1 else 0
            boxes = decoded(of_each_anchor(around[row : row + 1], count)[0], rows[:, :4])
            scores, classes = rows[:, 4:].max(1)
            if clips:
                boxes = clipped(boxes, image_size if image_sizes is None else image_sizes[image])  # type: ignore[arg-type]
            kept = (scores >= box_filter_threshold) & wide_and_high_enough(boxes, *bbox_min_hw)
            parts.append((boxes[kept], scores[kept], classes[kept] + offset))
        found = [torch.cat(of) for of in zip(*parts, strict=True)]
        first = best(found[1], pre_nms_top_k)
        found = [of[first] for of in found]
        kept = survivors(found[0], found[1], found[2], nms_threshold, nms_margin)[:post_nms_top_k]
        results += [_filled(of[kept], post_nms_top_k, nms_padding_mode) for of in found]
    return results


def _check(
    data: Sequence[Tensor], anchors: Sequence[Tensor], num_classes: int, branches: int
) -> None:
    shapes = [tuple(x.shape) for x in data], [tuple(x.shape) for x in anchors]
    fits = len(shapes[0]) == len(shapes[1]) == branches
    for values, around in zip(*shapes, strict=False):
        fits = fits and len(values) == len(around) == 4 and around[1] % 4 == 0
        fits = fits and values[1] * 4 == around[1] * (4 + num_classes)
        fits = fits and values[2:] == around[2:] and around[0] in (1, values[0])
    if not fits:
        raise ValueError(
            f"DetectionPostProcessV1: data {shapes[0]} and anchors {shapes[1]} do not belong "
            f"together: expected [N, {4 + num_classes}·A, H, W] and [N, A·4, H, W] for each of "
            f"{branches} branches (one for each of class_offsets)"
        )


def _filled(values: Tensor, count: int, mode: str | None) -> Tensor:
    """Rows up to a number: zeros, or the same rows again."""
    if mode is None or len(values) == count:
        return values.clone()
    if mode == "rollover" and len(values):
        return values[torch.arange(count, device=values.device) % len(values)]
    return torch.cat([values, values.new_zeros(count - len(values), *values.shape[1:])])
