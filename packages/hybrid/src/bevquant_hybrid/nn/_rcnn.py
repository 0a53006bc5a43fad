"""Two-stage detectors: anchors, box decoding, non-maximum suppression and detections."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from bevquant_hybrid._integer_ops import keep_settings, operator, settings_of
from bevquant_hybrid.nn._correlation import plain_sizes
from bevquant_hybrid.nn._functions import showing
from bevquant_hybrid.qtensor import as_float

Found = tuple[Tensor, Tensor, Tensor]  # boxes, scores, classes
_LARGEST = math.log(1000 / 16)  # largest growth of a side in Detectron and torchvision


def of_each_anchor(maps: Tensor, anchors: int) -> Tensor:
    """``[N, anchors · k, H, W]`` as ``[N, H · W · anchors, k]``: row, column, then anchor."""
    batch, channels, height, width = maps.shape
    split = maps.reshape(batch, anchors, channels // anchors, height, width)
    return split.permute(0, 3, 4, 1, 2).reshape(batch, -1, channels // anchors)


def decoded(anchors: Tensor, deltas: Tensor, absolute: bool = False) -> Tensor:
    r"""Boxes decoded from anchors and regressions (dx, dy, dw, dh), both ``[…, 4]``.

    :math:`x = x_a + d_x w_a,\; y = y_a + d_y h_a,\; w = w_a e^{d_w},\; h = h_a e^{d_h}` of centres
    and sides (Girshick et al., R-CNN, 2014, appendix C). With `absolute`, dx and dy are pixels.
    """
    low, high = anchors[..., :2], anchors[..., 2:]
    size = high - low
    moved = deltas[..., :2] if absolute else deltas[..., :2] * size
    centre = (low + high) / 2 + moved
    # An exponential of a wild regression would leave the range of floats.
    half = size * deltas[..., 2:].clamp(max=_LARGEST).exp() / 2
    return torch.cat([centre - half, centre + half], -1)


def clipped(boxes: Tensor, image_size: Sequence[float]) -> Tensor:
    """Corners clipped to 0 … width and 0 … height of an image ``(height, width)``."""
    height, width = (float(side) for side in image_size)
    zero = boxes.new_zeros(4)
    return boxes.clamp(min=zero, max=boxes.new_tensor([width, height, width, height]))


def wide_and_high_enough(boxes: Tensor, height: float, width: float) -> Tensor:
    """Mask of boxes ``[n, 4]`` with at least these sides."""
    sides = boxes[:, 2:] - boxes[:, :2]
    return (sides[:, 0] >= width) & (sides[:, 1] >= height)


def best(scores: Tensor, count: int | None) -> Tensor:
    """Indices of the highest scores in descending order (stable). None: all."""
    return torch.sort(scores, descending=True, stable=True).indices[:count]


def _overlaps(box: Tensor, boxes: Tensor) -> Tensor:
    """Intersection over union of one box with others ``[n, 4]``; 0 for an empty union."""
    low, high = torch.maximum(box[:2], boxes[:, :2]), torch.minimum(box[2:], boxes[:, 2:])
    shared = (high - low).clamp(min=0).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)
    union = (box[2:] - box[:2]).clamp(min=0).prod() + areas - shared
    return torch.where(union > 0, shared / union, torch.zeros_like(shared))


def survivors(
    boxes: Tensor, scores: Tensor, classes: Tensor, iou_threshold: float, margin: float
) -> Tensor:
    """Non-maximum suppression within classes, from the highest score down.

    Returns the indices of kept boxes, in descending order of scores (stable).
    """
    order = best(scores, None)
    boxes, scores, classes = boxes[order], scores[order], classes[order]
    alive = torch.ones(len(order), dtype=torch.bool, device=boxes.device)
    for i in range(len(order)):
        if not alive[i]:
            continue
        behind = slice(i + 1, None)
        # Below 0, the margin lets equal scores suppress too.
        above = scores[i] - scores[behind] > margin
        covered = _overlaps(boxes[i], boxes[behind]) > iou_threshold
        alive[behind] &= ~(above & covered & (classes[behind] == classes[i]))
    return order[alive]


def taken(found: Any, which: Tensor) -> Found:
    """The boxes, scores and classes at places."""
    boxes, scores, classes = found
    return boxes[which], scores[which], classes[which]


def fitted(found: Found, sides: Any, least: Sequence[float] | None) -> Found:
    """Boxes clipped to an image ``(height, width)``, without those below a height and width."""
    boxes = found[0] if sides is None else clipped(found[0], sides)
    found = boxes, *found[1:]
    return found if least is None else taken(found, wide_and_high_enough(boxes, *least))


def suppressed(
    found: Any,
    iou_threshold: float | None,
    before: int | None,
    after: int | None,
    margin: float = 0.0,
) -> Found:
    """The best boxes that `survivors` keeps, of the best ones before; best first."""
    found = taken(found, best(found[1], before))
    if iou_threshold is not None:
        found = taken(found, survivors(found[0], found[1], found[2], iou_threshold, margin))
    return taken(found, best(found[1], after))


def refuse_below_one(name: str, counts: Mapping[str, int | None], also: str = "") -> None:
    """Refuse a count below 1."""
    for what, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name}: {what}={count}: expected 1 or more{also}")


class AnchorGenerator(nn.Module):
    r"""Anchor boxes around every cell of feature maps, for region proposals.

    A replacement of torchvision's operator of this name (anchors: Ren et al., Faster R-CNN, 2015,
    section 3.1.1). The anchors of the cell in row i and column j of a map of stride t are

    .. math:: (jt, it, jt, it) + \tfrac12 (-w, -h, w, h), \qquad
              w = b s / \sqrt r, \quad h = b s \sqrt r

    for each ratio r = h/w and scale s, with area (b·s)². The documents give no constructor: the
    arguments are those of public configurations. Centres at multiples of the stride, the slowest
    index for ratios and rounded corners follow torchvision.

    Args:
        feat_strides: Cell size of each map in pixels of the model's input.
        scales: Sides of the anchors as multiples of the base size.
        ratios: Heights divided by widths.
        base_sizes: b of each map in pixels (default: its stride).
        anchor_wh_groups: Anchors of each map as ``[width, height]`` in pixels, instead of scales
            and ratios.
        legacy_bbox: A box ends at its last pixel: its corners are w − 1 and h − 1 apart.
        round_anchor: Round the corners' distances from the centre to whole pixels, half to even.

    Raises:
        ValueError: Arguments that do not fit, or neither scales and ratios nor groups.

    Example:
        >>> anchors = AnchorGenerator([8], scales=[1, 2], ratios=[1])
        >>> [boxes] = anchors([torch.zeros(1, 16, 2, 3)])
        >>> boxes.shape, boxes[0, 4:, 1, 2]  # the second anchor of the last cell
        (torch.Size([1, 8, 2, 3]), tensor([ 8.,  0., 24., 16.]))
    """

    def __init__(
        self,
        feat_strides: Sequence[float],
        scales: Sequence[float] | None = None,
        ratios: Sequence[float] | None = None,
        base_sizes: Sequence[float] | None = None,
        anchor_wh_groups: Sequence[Sequence[Sequence[float]]] | None = None,
        legacy_bbox: bool = False,
        round_anchor: bool = False,
    ) -> None:
        super().__init__()
        sized = scales is not None and ratios is not None
        if sized == (anchor_wh_groups is not None):
            raise ValueError(
                "AnchorGenerator: give scales and ratios, or anchor_wh_groups, and not both; got "
                f"scales={scales}, ratios={ratios}, anchor_wh_groups={anchor_wh_groups}"
            )
        self.feat_strides = list(feat_strides)
        bases = self.feat_strides if base_sizes is None else list(base_sizes)
        if anchor_wh_groups is not None:
            groups = [[(float(w), float(h)) for w, h in group] for group in anchor_wh_groups]
        else:
            assert scales is not None
            assert ratios is not None
            sides = [(r**0.5, s) for r in _positive("ratios", ratios) for s in scales]
            groups = [[(b * s / root, b * s * root) for root, s in sides] for b in bases]
        counts = len(self.feat_strides), len(bases), len(groups)
        if not counts[0] or len(set(counts)) != 1:
            raise ValueError(
                f"AnchorGenerator: {counts[0]} feat_strides, {counts[1]} base_sizes and "
                f"{counts[2]} groups of anchors: expected one of each for each feature map"
            )
        _positive("feat_strides", self.feat_strides)
        for group in groups:
            _positive("widths and heights", [side for pair in group for side in pair])
        self.anchor_wh_groups = groups
        self.legacy_bbox, self.round_anchor = legacy_bbox, round_anchor

    def forward(self, feature_maps: Sequence[Tensor]) -> list[Tensor]:
        """Make anchors.

        Args:
            feature_maps: ``[N, C, H, W]`` for each stride, float or quantized. Only their shapes
                are used; they must not change after tracing.

        Returns:
            For each map ``[N, anchors · 4, H, W]``, float32: left, top, right, bottom of each
            anchor in turn, in pixels of the model's input.

        Raises:
            ValueError: More or fewer maps than strides, or maps without four axes.
        """
        shapes = [plain_sizes(x) for x in feature_maps]
        if len(shapes) != len(self.feat_strides) or any(len(shape) != 4 for shape in shapes):
            raise ValueError(
                f"AnchorGenerator: expected {len(self.feat_strides)} feature maps [N, C, H, W] "
                f"(one for each of feat_strides), got shapes {shapes}"
            )
        levels = zip(feature_maps, shapes, self.feat_strides, self.anchor_wh_groups, strict=True)
        with warnings.catch_warnings():  # a trace holds anchors as constants, as it should
            warnings.simplefilter("ignore", TracerWarning)
            return [
                self._around_cells(shape, stride, group).to(x.device)
                for x, shape, stride, group in levels
            ]

    def _around_cells(
        self, shape: tuple[int, ...], stride: float, group: Sequence[tuple[float, float]]
    ) -> Tensor:
        batch, _, height, width = shape
        # In old detectors a box from 0 to 15 is 16 wide.
        extent = torch.tensor(group, dtype=torch.float64) - (1.0 if self.legacy_bbox else 0.0)
        corners = torch.cat([-extent / 2, extent / 2], 1)
        if self.round_anchor:
            corners = corners.round()
        rows, columns = (torch.arange(n, dtype=torch.float64) * stride for n in (height, width))
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        boxes = torch.stack([x, y, x, y]) + corners[:, :, None, None]  # [A, 4, H, W]
        return boxes.float().reshape(1, -1, height, width).repeat(batch, 1, 1, 1)

    def extra_repr(self) -> str:
        """Print strides and the number of anchors per cell."""
        return (
            f"feat_strides={self.feat_strides}, "
            f"anchors={[len(group) for group in self.anchor_wh_groups]}"
        )


def _positive(name: str, values: Sequence[float]) -> Sequence[float]:
    if not values or min(values) <= 0:
        raise ValueError(f"AnchorGenerator: {name}={list(values)}: expected numbers above 0")
    return values


class RcnnPostProcess(nn.Module):
    """Detections from Fast R-CNN's head, on the CPU.

    For each image:

    1. Each box gets the class with the highest score. It is dropped if that is the background
        (class 0) or the score is below `box_filter_threshold`.
    2. It moves by that class's deltas · `delta_std` + `delta_mean` = (dx, dy, dw, dh): x = x_b +
       dx·w_b, y = y_b + dy·h_b, w = w_b·exp(dw), h = h_b·exp(dh) of centres and sides, and is
       clipped to the image.
    3. In descending order of scores, a box is dropped if a kept one of the same class overlaps it
        by more than `nms_threshold` (intersection over union).
    4. The best `post_nms_top_k` are kept; rows of −1 fill up to that number.

    The documents name the arguments, the shapes and these steps. This package chose the rest. The
    background is class 0, as in Fast R-CNN, and returned classes count from 0 without it. Scores
    get no softmax. w_b and h_b are x2 − x1 and y2 − y1. dw and dh are limited to log(1000/16).
    Equal scores keep the order of the boxes.

    Inputs are floats or quantized tensors, which it dequantizes. Prepare and convert do not change
    it. It has no gradient.

    Args:
        image_size: ``(height, width)`` of every image, unless each call passes them.
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
        keep_settings(self, locals())
        counts = {"num_classes": num_classes, "post_nms_top_k": post_nms_top_k}
        refuse_below_one("RcnnPostProcess", counts)
        for what, four in (("delta_mean", delta_mean), ("delta_std", delta_std)):
            if len(four) != 4:
                raise ValueError(
                    f"RcnnPostProcess: {what}={list(four)}: expected four numbers, for dx, dy, dw "
                    "and dh"
                )

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
            image_sizes: ``[N, 2]``: height and width of each image, instead of `image_size`.

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
            **settings_of(self, detect_regions),
        )

    extra_repr = showing("num_classes", "box_filter_threshold", "nms_threshold", "post_nms_top_k")


@operator
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
    """Implementation of `RcnnPostProcess`."""
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
    highest, classes = scores.reshape(count, -1).max(1)
    each = deltas.reshape(count, num_classes + 1, 4)
    moves = each[torch.arange(count, device=each.device), classes].float()
    moves = moves * moves.new_tensor(delta_std) + moves.new_tensor(delta_mean)
    results = []
    start = 0
    for image, regions in enumerate(boxes):
        own = slice(start, start + len(regions))
        start += len(regions)
        # Class 0 is the background.
        kept = (classes[own] > 0) & (highest[own] >= box_filter_threshold)
        size: Any = image_size if image_sizes is None else image_sizes[image]
        moved = clipped(decoded(regions.float()[kept], moves[own][kept]), size)
        found = moved, highest[own][kept].float(), classes[own][kept] - 1
        # −1: among equal scores the first one suppresses the others.
        corners, score, kind = suppressed(found, nms_threshold, None, post_nms_top_k, -1.0)
        rows = torch.cat([corners, score[:, None], kind[:, None].float()], 1)
        # Rows of −1 fill up to a fixed shape.
        missing = rows.new_full((post_nms_top_k - len(rows), 6), -1.0)
        results.append(torch.cat([rows, missing]))
    return torch.stack(results)
