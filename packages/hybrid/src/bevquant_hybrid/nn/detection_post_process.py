"""From anchors, scores and regressions to detections, for most detectors with anchors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from bevquant_hybrid.nn._detect import detect
from bevquant_hybrid.qtensor import as_float

__all__ = ["DetectionPostProcess"]


class DetectionPostProcess(nn.Module):
    """Detections of YOLO, SSD, RetinaNet, Faster R-CNN and the like, on the CPU.

    For each image, and until step 5 for each level (feature map) apart:

    1. Of the anchors, those `pre_decode_top_n` are kept whose first score is highest.
    2. Each anchor becomes a box by its regression times `regression_scale`: x = x_a + dx·w_a,
       y = y_a + dy·h_a, w = w_a·exp(dw), h = h_a·exp(dh) of centres and sides.
    3. Each box stands once for each class, with that class's score, unless the class is
       `background_class_idx` or the score is below `score_threshold`.
    4. Boxes are cut to the image, and dropped where a side is below `size_threshold`.
    5. The best `post_decode_top_n` are kept; then levels are joined.
    6. The best `pre_nms_top_n` are kept; where `iou_threshold` is given, a box is dropped if one of
       the same class with a higher score overlaps it by more than that (intersection over union;
       among equal scores none drops the other, as documented); the best `post_nms_top_n` are kept.
       With `nms_on_each_level` this happens to each level before they are joined, and the last cut
       once more behind it.

    ``mode="yolo"``: the first score is the objectness, which `score_threshold` holds for in the
    place of the classes' scores, and which those are multiplied by; classes count from the score
    behind it; dx and dy are pixels (x = x_a + dx).

    The documents name the arguments and what each does. Where they are silent this is the choice:
    the order of the steps, what is done by level, w_a and h_a as x2 − x1 and y2 − y1, dw and dh
    cut at log(1000/16), equals in the order of level, row, column, anchor, class.

    It takes what DeQuantStubs give, or quantized tensors, which it dequantizes; prepare and
    convert leave it as it is. Nothing of it has a gradient.

    Args:
        score_threshold: Least score of a box.
        regression_scale: Factors of dx, dy, dw, dh; None for 1.
        background_class_idx: Class that gives no boxes; None for none.
        size_threshold: Least height and width of a box in pixels; None for any.
        image_size: ``(height, width)`` to cut boxes to, unless each call gives its images'.
        pre_decode_top_n: Anchors of a level to go on with; None for all, as for what follows.
        post_decode_top_n: Boxes of a level to go on with.
        iou_threshold: Overlap that is allowed; None for no suppression.
        pre_nms_top_n: Boxes that suppression looks at.
        post_nms_top_n: Boxes to return.
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
        if mode not in ("normal", "yolo"):
            raise ValueError(f"DetectionPostProcess: mode={mode!r}: expected 'normal' or 'yolo'")
        counts = {
            **{"pre_decode_top_n": pre_decode_top_n, "post_decode_top_n": post_decode_top_n},
            **{"pre_nms_top_n": pre_nms_top_n, "post_nms_top_n": post_nms_top_n},
        }
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(
                    f"DetectionPostProcess: {name}={count}: expected 1 or more, or None for all"
                )
        self.score_threshold = score_threshold
        self.regression_scale = regression_scale
        self.background_class_idx = background_class_idx
        self.size_threshold = size_threshold
        self.image_size = image_size
        self.pre_decode_top_n, self.post_decode_top_n = pre_decode_top_n, post_decode_top_n
        self.iou_threshold = iou_threshold
        self.pre_nms_top_n, self.post_nms_top_n = pre_nms_top_n, post_nms_top_n
        self.nms_on_each_level = nms_on_each_level
        self.mode = mode

    def forward(
        self,
        boxes: Sequence[Tensor],
        scores: Sequence[Tensor],
        regressions: Sequence[Tensor],
        image_shapes: Tensor | None = None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Detect.

        Args:
            boxes: Anchors of each level, ``[N, A · 4, H, W]`` as `AnchorGenerator` makes them, or
                ``[N, M, 4]``; N may be 1 for all images.
            scores: For each level ``[N, A · scores, H, W]`` or ``[N, M, scores]``.
            regressions: For each level ``[N, A · 4, H, W]`` or ``[N, M, 4]``; or as many times 4 as
                there are classes (scores, less the objectness of ``"yolo"``), class by class.
            image_shapes: ``[N, 2]``: height and width of each image, to cut boxes to.

        Returns:
            For each image, best score first: boxes ``[n, 4]``, scores ``[n]``, and classes
            ``[n]``, int64.

        Raises:
            ValueError: Shapes that do not fit.
        """
        scale = self.regression_scale
        found = detect(
            [as_float(x) for x in boxes],
            [as_float(x) for x in scores],
            [as_float(x) for x in regressions],
            None if image_shapes is None else as_float(image_shapes),
            float(self.score_threshold),
            None if scale is None else [float(factor) for factor in scale],
            self.background_class_idx,
            None if self.size_threshold is None else float(self.size_threshold),
            None if self.image_size is None else [int(side) for side in self.image_size],
            self.pre_decode_top_n,
            self.post_decode_top_n,
            None if self.iou_threshold is None else float(self.iou_threshold),
            self.pre_nms_top_n,
            self.post_nms_top_n,
            self.nms_on_each_level,
            self.mode,
        )
        images = len(found) // 3
        return tuple(found[:images]), tuple(found[images:-images]), tuple(found[-images:])

    def extra_repr(self) -> str:
        """Print thresholds and mode."""
        return (
            f"score_threshold={self.score_threshold}, iou_threshold={self.iou_threshold}, "
            f"mode={self.mode!r}"
        )
