"""Detections from heads and anchors, one box for each anchor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid import _integer_ops as ops
from bevquant_hybrid._integer_ops import keep_settings, operator, settings_of
from bevquant_hybrid.nn._functions import showing
from bevquant_hybrid.qtensor import QTensor, as_float

from ._rcnn import decoded, fitted, of_each_anchor, refuse_below_one, suppressed, taken

__all__ = ["DetectionPostProcessV1", "detect_v1"]


@operator
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
    """Implementation of `DetectionPostProcessV1`: boxes, scores and classes, image by image."""
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
            found = taken((boxes, scores, classes + offset), scores >= box_filter_threshold)
            sides: Any = image_size if image_sizes is None else image_sizes[image]
            parts.append(fitted(found, sides if clips else None, bbox_min_hw))
        every = tuple(torch.cat(of) for of in zip(*parts, strict=True))
        found = suppressed(every, nms_threshold, pre_nms_top_k, post_nms_top_k, nms_margin)
        results += [_filled(of, post_nms_top_k, nms_padding_mode) for of in found]
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
    """Rows padded to a number with zeros, or by repetition."""
    if mode is None or len(values) == count:
        return values.clone()
    if mode == "rollover" and len(values):
        return values[torch.arange(count, device=values.device) % len(values)]
    return torch.cat([values, values.new_zeros(count - len(values), *values.shape[1:])])


class DetectionPostProcessV1(nn.Module):
    """Detections from heads with regressions and scores in one map; on BERNOULLI2 only.

    For each image:

    1. Each anchor of each branch gets the class with the highest score, plus that branch's entry of
       `class_offsets`; it is dropped if that score is below `box_filter_threshold`.
    2. It becomes a box by its regression: x = x_a + dx·w_a, y = y_a + dy·h_a, w = w_a·exp(dw),
       h = h_a·exp(dh) of centres and sides.
    3. Boxes are clipped to the image with `use_clippings`, and dropped if they are lower or
        narrower than `bbox_min_hw`.
    4. The best `pre_nms_top_k` of all branches are kept.
    5. A box is dropped if one of the same class overlaps it by more than `nms_threshold`
       (intersection over union) and has a score that is higher by more than `nms_margin`.
    6. The best `post_nms_top_k` are kept, and padded to that number by `nms_padding_mode`.

    The documents name the arguments and their effects. This package chose the order of the steps.
    The channels of an anchor are dx, dy, dw, dh and then its scores; w_a and h_a are x2 − x1 and y2
    − y1; dw and dh are limited to log(1000/16). Equal scores are ordered by branch, row, column and
    anchor, so `use_stable_sort` has no effect.

    Quantized maps have 8 bits and scale 1/16, as documented. Others are requantized,
    clamp(round(16·x), −128, 127), ties as in the model: values above 7.9375 saturate. They are then
    dequantized, and the rest is computed in floats, where the chip may round again. Float maps are
    not rounded. Prepare and convert do not change the module. It has no gradient.

    Args:
        num_classes: Scores of each anchor.
        box_filter_threshold: Least score of a box.
        class_offsets: Offset added to the classes of each branch.
        use_clippings: Clip boxes to the image; or one flag per branch.
        image_size: ``(height, width)`` of every image; None if each call passes them.
        nms_threshold: Allowed overlap.
        pre_nms_top_k: Most boxes of an image before suppression.
        post_nms_top_k: Most boxes returned per image.
        nms_padding_mode: None for no padding; ``"pad_zero"``: zeros; ``"rollover"``: the boxes
            repeated from the first one (zeros if there is none).
        nms_margin: Required score difference.
        use_stable_sort: Accepted; sorting is always stable.
        bbox_min_hw: Least height and width of a box in pixels.

    Raises:
        ValueError: A setting does not fit; the message names it.

    Example:
        >>> detect = DetectionPostProcessV1(2, 0.5, [0], True, (16, 16), 0.5, 100, 10)
        >>> head = torch.tensor([0.0, 0, 0, 0, 0.2, 0.9]).reshape(1, 6, 1, 1)
        >>> anchor = torch.tensor([-4.0, 2, 8, 6]).reshape(1, 4, 1, 1)
        >>> detect([head], [anchor])  # of the second class, cut at the left
        [(tensor([[0., 2., 8., 6.]]), tensor([0.9000]), tensor([1]))]
    """

    def __init__(
        self,
        num_classes: int,
        box_filter_threshold: float,
        class_offsets: Sequence[int],
        use_clippings: bool | Sequence[bool],
        image_size: tuple[int, int] | None,
        nms_threshold: float,
        pre_nms_top_k: int,
        post_nms_top_k: int,
        nms_padding_mode: str | None = None,
        nms_margin: float = 0.0,
        use_stable_sort: bool | None = None,
        bbox_min_hw: tuple[float, float] = (0, 0),
    ) -> None:
        super().__init__()
        keep_settings(self, locals())
        name = "DetectionPostProcessV1"
        if nms_padding_mode not in (None, "pad_zero", "rollover"):
            raise ValueError(
                f"{name}: nms_padding_mode={nms_padding_mode!r}: expected None, 'pad_zero' or "
                "'rollover'"
            )
        counts = {"pre_nms_top_k": pre_nms_top_k, "post_nms_top_k": post_nms_top_k}
        refuse_below_one(name, {"num_classes": num_classes, **counts})
        clippings = (
            list(use_clippings)
            if isinstance(use_clippings, Sequence)
            else [use_clippings] * len(class_offsets)
        )
        if not class_offsets or len(clippings) != len(class_offsets):
            raise ValueError(
                f"{name}: class_offsets={list(class_offsets)} and use_clippings={use_clippings}: "
                "expected one of each for each branch"
            )
        self.use_clippings = [int(clips) for clips in clippings]

    def forward(
        self,
        data: Sequence[Tensor],
        anchors: Sequence[Tensor],
        image_sizes: Tensor | tuple[int, int] | None = None,
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Detect.

        Args:
            data: For each branch ``[N, (4 + num_classes) · A, H, W]``.
            anchors: For each branch ``[N, A · 4, H, W]``, as from `AnchorGenerator`; N may be 1 for
                all images.
            image_sizes: ``[N, 2]`` or one ``(height, width)``, instead of `image_size`.

        Returns:
            For each image, best score first: boxes ``[n, 4]`` as (x1, y1, x2, y2), scores ``[n]``
            and classes ``[n]``, int64.

        Raises:
            ValueError: Shapes that do not fit, or clipping without an image size.
        """
        one: Any = self.image_size
        each = None
        if isinstance(image_sizes, Tensor):
            each = as_float(image_sizes)
        elif image_sizes is not None:
            one = image_sizes
        operate: Any = detect_v1
        found = operate(
            [_in_sixteenths(x) for x in data],
            [as_float(x) for x in anchors],
            each,
            **{**settings_of(self, detect_v1), "image_size": one},
        )
        return list(zip(found[::3], found[1::3], found[2::3], strict=True))

    extra_repr = showing("num_classes", "box_filter_threshold", "nms_threshold", "nms_margin")


def _in_sixteenths(x: Tensor) -> Tensor:
    """A quantized map rounded to 1/16 steps, in floats; other maps unchanged."""
    if not isinstance(x, QTensor):
        return x
    values = x.dequantize()
    step = torch.full((1,), 1 / 16, device=values.device)
    return ops.dequantize(ops.quantize(values, step, -1, 8, x.rounding), step, -1)
