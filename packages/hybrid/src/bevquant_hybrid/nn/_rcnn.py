"""From regions, scores and regressions to detections, behind the second stage of an R-CNN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bevquant_hybrid._torch_operator import operator
from bevquant_hybrid.nn._boxes import clipped, decoded, survivors
from bevquant_hybrid.qtensor import as_float

__all__ = ["RcnnPostProcess"]


class RcnnPostProcess(nn.Module):
    """Detections of Fast R-CNN's head, on the CPU.

    For each image:

    1. Each box gets the class with the highest score; it is dropped where that is the background
       (class 0) or the score is below `box_filter_threshold`.
    2. It moves by that class's deltas · `delta_std` + `delta_mean` = (dx, dy, dw, dh):
       x = x_b + dx·w_b, y = y_b + dy·h_b, w = w_b·exp(dw), h = h_b·exp(dh) of centres and sides,
       and is cut to the image.
    3. From the highest score down, a box is dropped where a kept one of the same class overlaps it
       by more than `nms_threshold` (intersection over union).
    4. The best `post_nms_top_k` are kept; rows of −1 fill up to that number.

    The documents name the arguments, the shapes and these steps. Where they are silent this is the
    choice: the background is class 0, as in Fast R-CNN, and classes are returned without it, from
    0; scores are taken as they come, without a softmax; w_b and h_b are x2 − x1 and y2 − y1; dw and
    dh are cut at log(1000/16); among equal scores the first box goes first.

    It takes what DeQuantStubs give, or quantized tensors, which it dequantizes; prepare and
    convert leave it as it is. Nothing of it has a gradient.

    Args:
        image_size: ``(height, width)`` of every image, unless each call gives them.
        nms_threshold: Overlap that is allowed.
        box_filter_threshold: Least score of a box.
        num_classes: Classes without the background.
        post_nms_top_k: Rows of each image's result.
        delta_mean: Added to deltas.
        delta_std: Factors of deltas before that.

    Raises:
        ValueError: A count below 1, or other than four means and deviations.

    Example:
        >>> detect = RcnnPostProcess((32, 32), num_classes=2, post_nms_top_k=2)
        >>> scores = torch.tensor([0.1, 0.2, 0.7]).reshape(1, 3, 1, 1)
        >>> detect([torch.tensor([[4.0, 4, 12, 8]])], scores, torch.zeros(1, 12, 1, 1))
        tensor([[[ 4.0000,  4.0000, 12.0000,  8.0000,  0.7000,  1.0000],
                 [-1.0000, -1.0000, -1.0000, -1.0000, -1.0000, -1.0000]]])
    """

    def __init__(
        self,
        image_size: tuple[int, int] = (1024, 1024),
        nms_threshold: float = 0.3,
        box_filter_threshold: float = 0.1,
        num_classes: int = 1,
        post_nms_top_k: int = 100,
        delta_mean: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
        delta_std: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
    ) -> None:
        super().__init__()
        for what, count in (("num_classes", num_classes), ("post_nms_top_k", post_nms_top_k)):
            if count < 1:
                raise ValueError(f"RcnnPostProcess: {what}={count}: expected 1 or more")
        for what, four in (("delta_mean", delta_mean), ("delta_std", delta_std)):
            if len(four) != 4:
                raise ValueError(
                    f"RcnnPostProcess: {what}={list(four)}: expected four numbers, for dx, dy, dw "
                    "and dh"
                )
        self.image_size = image_size
        self.nms_threshold, self.box_filter_threshold = nms_threshold, box_filter_threshold
        self.num_classes, self.post_nms_top_k = num_classes, post_nms_top_k
        self.delta_mean, self.delta_std = list(delta_mean), list(delta_std)

    def forward(
        self,
        boxes: Sequence[Tensor],
        scores: Tensor,
        deltas: Tensor,
        image_sizes: Tensor | None = None,
    ) -> Tensor:
        """Detect.

        Args:
            boxes: For each image ``[n, 4]``, as (x1, y1, x2, y2) in pixels.
            scores: ``[boxes of all images, num_classes + 1, 1, 1]``, the background first.
            deltas: ``[boxes of all images, (num_classes + 1) · 4, 1, 1]``, class by class.
            image_sizes: ``[N, 2]``: height and width of each image, in the place of `image_size`.

        Returns:
            ``[N, post_nms_top_k, 6]``, float32: x1, y1, x2, y2, score, class; best score first.

        Raises:
            ValueError: Shapes that do not fit.
        """
        return detect_regions(
            [as_float(x) for x in boxes],
            as_float(scores),
            as_float(deltas),
            None if image_sizes is None else as_float(image_sizes),
            [int(side) for side in self.image_size],
            float(self.nms_threshold),
            float(self.box_filter_threshold),
            self.num_classes,
            self.post_nms_top_k,
            [float(mean) for mean in self.delta_mean],
            [float(deviation) for deviation in self.delta_std],
        )

    def extra_repr(self) -> str:
        """Print classes and thresholds."""
        return (
            f"num_classes={self.num_classes}, box_filter_threshold={self.box_filter_threshold}, "
            f"nms_threshold={self.nms_threshold}, post_nms_top_k={self.post_nms_top_k}"
        )


@operator(
    "(Tensor[] boxes, Tensor scores, Tensor deltas, Tensor? image_sizes, int[] image_size, "
    "float nms_threshold, float box_filter_threshold, int num_classes, int post_nms_top_k, "
    "float[] delta_mean, float[] delta_std) -> Tensor"
)
def detect_regions(
    boxes: Sequence[Tensor],
    scores: Tensor,
    deltas: Tensor,
    image_sizes: Tensor | None,
    image_size: Sequence[int],
    nms_threshold: float,
    box_filter_threshold: float,
    num_classes: int,
    post_nms_top_k: int,
    delta_mean: Sequence[float],
    delta_std: Sequence[float],
) -> Tensor:
    """What `RcnnPostProcess` computes."""
    count = sum(len(of) for of in boxes)
    wanted = (count, num_classes + 1), (count, 4 * (num_classes + 1))
    shapes = [tuple(x.shape) for x in boxes], tuple(scores.shape), tuple(deltas.shape)
    fits = all(len(shape) == 2 and shape[1] == 4 for shape in shapes[0])
    fits = fits and all(
        shape[:2] == size and set(shape[2:]) <= {1}
        for shape, size in zip(shapes[1:], wanted, strict=True)
    )
    if not boxes or not fits:
        raise ValueError(
            f"RcnnPostProcess: boxes {shapes[0]}, scores {shapes[1]} and deltas {shapes[2]} do not "
            f"belong together: expected [n, 4] for each image, [Σn, {num_classes + 1}, 1, 1] and "
            f"[Σn, {4 * (num_classes + 1)}, 1, 1]"
        )
    best, classes = scores.reshape(count, -1).max(1)
    each = deltas.reshape(count, num_classes + 1, 4)
    moves = each[torch.arange(count, device=each.device), classes].float()
    moves = moves * moves.new_tensor(delta_std) + moves.new_tensor(delta_mean)
    results = []
    start = 0
    for image, regions in enumerate(boxes):
        own = slice(start, start + len(regions))
        start += len(regions)
        kept = (classes[own] > 0) & (best[own] >= box_filter_threshold)
        moved = decoded(regions.float()[kept], moves[own][kept])
        moved = clipped(moved, image_size if image_sizes is None else image_sizes[image])  # type: ignore[arg-type]
        score, kind = best[own][kept].float(), classes[own][kept] - 1
        # −1: of equal scores too the one that comes first drops the other.
        first = survivors(moved, score, kind, nms_threshold, -1.0)[:post_nms_top_k]
        rows = torch.cat([moved, score[:, None], kind[:, None].float()], 1)[first]
        missing = rows.new_full((post_nms_top_k - len(rows), 6), -1.0)
        results.append(torch.cat([rows, missing]))
    return torch.stack(results)
