"""Detections from anchors, scores and regressions, for most anchor-based detectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid._integer_ops import keep_settings, operator, settings_of
from bevquant_hybrid.nn._functions import showing
from bevquant_hybrid.qtensor import as_float

from ._rcnn import Found, best, decoded, fitted, of_each_anchor, refuse_below_one, suppressed, taken

__all__ = ["DetectionPostProcess", "detect"]


@operator
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
    """Implementation of `DetectionPostProcess`: boxes of all images, then scores, then classes."""
    yolo = mode == "yolo"
    levels = [
        _level(i, *given, yolo)
        for i, given in enumerate(zip(boxes, scores, regressions, strict=True))
    ]
    images = max(len(level[1]) for level in levels)
    results: list[Found] = []
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
            least = None if size_threshold is None else (size_threshold,) * 2
            found = fitted(found, sides, least)
            found = taken(found, best(found[1], post_decode_top_n))
            if nms_on_each_level:
                found = suppressed(found, iou_threshold, pre_nms_top_n, post_nms_top_n)
            joined.append(found)
        every = tuple(torch.cat(parts) for parts in zip(*joined, strict=True))
        if nms_on_each_level:
            results.append(taken(every, best(every[1], post_nms_top_n)))
        else:
            results.append(suppressed(every, iou_threshold, pre_nms_top_n, post_nms_top_n))
    return [part for parts in zip(*results, strict=True) for part in parts]


def _level(number: int, boxes: Tensor, scores: Tensor, regressions: Tensor, yolo: bool) -> Found:
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
) -> Found:
    """Boxes of all classes above the score threshold, from anchors ``[M, 4]``."""
    if scale is not None:
        deltas = deltas * deltas.new_tensor(scale)
    boxes = decoded(anchors[:, None], deltas, yolo)
    wanted = scores >= threshold
    if yolo:
        # The objectness alone has to reach the threshold; the classes are shares of it.
        wanted = wanted[:, :1].expand(-1, scores.shape[1] - 1).clone()
        scores = scores[:, 1:] * scores[:, :1]
    if background is not None and 0 <= background < scores.shape[1]:
        wanted[:, background] = False
    box, kind = wanted.nonzero(as_tuple=True)
    boxes = boxes.expand(-1, scores.shape[1], -1)
    return boxes[box, kind], scores[box, kind], kind


class DetectionPostProcess(nn.Module):
    """Detections of YOLO, SSD, RetinaNet, Faster R-CNN and similar models, on the CPU.

    For each image, and up to step 5 for each level (feature map) separately:

    1. The `pre_decode_top_n` anchors with the highest first score are kept.
    2. Each anchor becomes a box by its regression times `regression_scale`: x = x_a + dx·w_a,
       y = y_a + dy·h_a, w = w_a·exp(dw), h = h_a·exp(dh) of centres and sides.
    3. Each box is a candidate for each class, with that class's score, unless the class is
        `background_class_idx` or the score is below `score_threshold`.
    4. Boxes are clipped to the image, and dropped if a side is below `size_threshold`.
    5. The best `post_decode_top_n` are kept; then levels are joined.
    6. The best `pre_nms_top_n` are kept. With `iou_threshold`, a box is dropped if one of the same
        class with a higher score overlaps it by more (intersection over union; equal scores do not
        suppress each other, as documented). The best `post_nms_top_n` are kept. `nms_on_each_level`
        applies this step to each level before the join, and the last selection again after it.

    ``mode="yolo"``: the first score is the objectness, and classes count from the second.
    `score_threshold` applies to the objectness, and class scores are multiplied by it. dx and dy
    are pixels (x = x_a + dx).

    The documents name the arguments and their effects. This package chose the order of the steps,
    the steps per level, w_a and h_a as x2 − x1 and y2 − y1, the limit log(1000/16) of dw and dh,
    and the order of equal scores: level, row, column, anchor, class.

    Inputs are floats or quantized tensors, which it dequantizes. Prepare and convert do not change
    it. It has no gradient.

    Args:
        score_threshold: Least score of a box.
        regression_scale: Factors of dx, dy, dw, dh; None for 1.
        background_class_idx: Class without boxes; None for no such class.
        size_threshold: Least height and width of a box in pixels; None for any.
        image_size: ``(height, width)`` to clip boxes to, unless each call passes its images'
            sizes.
        pre_decode_top_n: Most anchors of a level; None for all, as for the arguments below.
        post_decode_top_n: Most boxes of a level.
        iou_threshold: Allowed overlap; None for no suppression.
        pre_nms_top_n: Most boxes before suppression.
        post_nms_top_n: Most boxes returned.
        nms_on_each_level: Suppress within levels.
        mode: ``"normal"`` or ``"yolo"``.

    Raises:
        ValueError: A mode that is neither, or a count below 1.

    Example:
        >>> import torch
        >>> anchors = torch.tensor([[[0.0, 0, 10, 10], [1.0, 0, 11, 10], [40.0, 40, 60, 50]]])
        >>> scores = torch.tensor([[[0.9], [0.8], [0.3]]])  # one class
        >>> detect = DetectionPostProcess(score_threshold=0.2, iou_threshold=0.5)
        >>> boxes, best, labels = detect([anchors], [scores], [torch.zeros(1, 3, 4)])
        >>> boxes[0].tolist(), best[0]
        ([[0.0, 0.0, 10.0, 10.0], [40.0, 40.0, 60.0, 50.0]], tensor([0.9000, 0.3000]))
    """

    def __init__(
        self,
        score_threshold: float = 0,
        regression_scale: tuple[float, float, float, float] | None = None,
        background_class_idx: int | None = None,
        size_threshold: float | None = None,
        image_size: tuple[int, int] | None = None,
        pre_decode_top_n: int | None = None,
        post_decode_top_n: int | None = None,
        iou_threshold: float | None = None,
        pre_nms_top_n: int | None = None,
        post_nms_top_n: int | None = None,
        nms_on_each_level: bool = False,
        mode: str = "normal",
    ) -> None:
        super().__init__()
        keep_settings(self, locals())
        if mode not in ("normal", "yolo"):
            raise ValueError(f"DetectionPostProcess: mode={mode!r}: expected 'normal' or 'yolo'")
        counts = {name: count for name, count in vars(self).items() if name.endswith("_top_n")}
        refuse_below_one("DetectionPostProcess", counts, ", or None for all")

    def forward(
        self,
        boxes: Sequence[Tensor],
        scores: Sequence[Tensor],
        regressions: Sequence[Tensor],
        image_shapes: Tensor | None = None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Detect.

        Args:
            boxes: Anchors of each level, ``[N, A · 4, H, W]`` as from `AnchorGenerator`, or ``[N,
                M, 4]``; N may be 1 for all images.
            scores: For each level ``[N, A · scores, H, W]`` or ``[N, M, scores]``.
            regressions: For each level ``[N, A · 4, H, W]`` or ``[N, M, 4]``; or 4 per class
                (scores without the objectness of ``"yolo"``), class by class.
            image_shapes: ``[N, 2]``: height and width of each image, to clip boxes to.

        Returns:
            For each image, best score first: boxes ``[n, 4]``, scores ``[n]``, and classes
            ``[n]``, int64.

        Raises:
            ValueError: Shapes that do not fit.
        """
        operate: Any = detect
        found = operate(
            *([as_float(x) for x in each] for each in (boxes, scores, regressions)),
            None if image_shapes is None else as_float(image_shapes),
            **settings_of(self, detect),
        )
        images = len(found) // 3
        return tuple(found[:images]), tuple(found[images:-images]), tuple(found[-images:])

    extra_repr = showing("score_threshold", "iou_threshold", "mode")
