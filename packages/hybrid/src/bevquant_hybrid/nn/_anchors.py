"""Anchors: boxes of given sizes around every cell of feature maps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from bevquant_hybrid._correlate import plain_sizes

__all__ = ["AnchorGenerator"]


class AnchorGenerator(nn.Module):
    r"""Boxes around every cell of feature maps, as region proposals start from.

    In the place of torchvision's operator of this name (anchors: Ren et al., Faster R-CNN, 2015,
    section 3.1.1). Around the cell in row i and column j of a map of stride t stand

    .. math:: (jt, it, jt, it) + \tfrac12 (-w, -h, w, h), \qquad
              w = b s / \sqrt r, \quad h = b s \sqrt r

    for each ratio r = h/w and scale s: area (b·s)² whatever the ratio. The documents give no
    constructor. Arguments are those that public configurations call it with; centres at multiples
    of the stride, ratios that vary slowest and rounded corners are torchvision's.

    Args:
        feat_strides: Pixels of the model's input from cell to cell, one for each map.
        scales: Sides of the anchors as multiples of the base size.
        ratios: Heights divided by widths.
        base_sizes: b of each map in pixels; None for its stride.
        anchor_wh_groups: In the place of scales and ratios, for each map its anchors as
            ``[width, height]`` in pixels.
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
            feature_maps: ``[N, C, H, W]`` for each stride, float or quantized; nothing but their
                shapes matters, which must not change once the model is traced.

        Returns:
            For each map ``[N, anchors · 4, H, W]``, float32: left, top, right, bottom of the first
            anchor, then of the next one, in pixels of the model's input.

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
        extent = torch.tensor(group, dtype=torch.float64) - (1.0 if self.legacy_bbox else 0.0)
        corners = torch.cat([-extent / 2, extent / 2], 1)
        if self.round_anchor:
            corners = corners.round()
        rows, columns = (torch.arange(n, dtype=torch.float64) * stride for n in (height, width))
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        boxes = torch.stack([x, y, x, y]) + corners[:, :, None, None]  # [A, 4, H, W]
        return boxes.float().reshape(1, -1, height, width).repeat(batch, 1, 1, 1)

    def extra_repr(self) -> str:
        """Print strides, and how many anchors a cell has."""
        return (
            f"feat_strides={self.feat_strides}, "
            f"anchors={[len(group) for group in self.anchor_wh_groups]}"
        )


def _positive(name: str, values: Sequence[float]) -> Sequence[float]:
    if not values or min(values) <= 0:
        raise ValueError(f"AnchorGenerator: {name}={list(values)}: expected numbers above 0")
    return values
