"""RoIAlign on feature maps of several strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid._sampling import multi_scale_roi_align
from bevquant_hybrid.nn._functions import showing
from bevquant_hybrid.qtensor import as_float


class MultiScaleRoIAlign(nn.Module):
    """`torchvision.ops.MultiScaleRoIAlign` on lists: the box size selects the map.

    Args:
        output_size: Bins in height and width, or one number for both.
        feature_strides: Input pixels per pixel of each map, powers of 2.
        sampling_ratio: Samples along each axis of a bin; 0 or less for one per pixel.
        canonical_scale: Side of a box of `canonical_level`, in pixels of the input.
        canonical_level: log₂ of the stride of that level.
        aligned: Put pixel centres at half steps.

    Raises:
        ValueError: Strides that are not powers of 2, or no bins.

    Example:
        >>> align = MultiScaleRoIAlign((2, 2), [4, 8])
        >>> maps = [torch.ones(1, 3, 32, 32), torch.ones(1, 3, 16, 16)]
        >>> align(maps, [torch.tensor([[8.0, 8.0, 40.0, 24.0]])]).shape
        torch.Size([1, 3, 2, 2])
    """

    def __init__(
        self,
        output_size: int | Sequence[int],
        feature_strides: Sequence[int],
        sampling_ratio: int = 1,
        canonical_scale: float = 224,
        canonical_level: float = 4,
        aligned: bool = False,
    ) -> None:
        super().__init__()
        sides = (output_size,) * 2 if isinstance(output_size, int) else tuple(output_size)
        powers = all(s > 0 and s & (s - 1) == 0 for s in feature_strides)
        if len(sides) != 2 or min(sides) < 1 or not feature_strides or not powers:
            raise ValueError(
                f"MultiScaleRoIAlign: output_size={output_size}, feature_strides="
                f"{list(feature_strides)}: expected one or two positive sizes and powers of 2"
            )
        self.output_size = sides
        self.feature_strides = list(feature_strides)
        self.sampling_ratio = sampling_ratio
        self.canonical_scale = canonical_scale
        self.canonical_level = canonical_level
        self.aligned = bool(aligned)

    def placed(self, featmaps: Sequence[Tensor], boxes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """All boxes in one tensor ``[K, 4]``, and the sample of each.

        Raises:
            ValueError: Maps or boxes that do not fit.
        """
        if len(featmaps) != len(self.feature_strides):
            raise ValueError(
                f"MultiScaleRoIAlign: expected {len(self.feature_strides)} feature maps (one for "
                f"each of feature_strides), got {len(featmaps)}"
            )
        plain = [as_float(box) for box in boxes]
        shapes = [tuple(box.shape) for box in plain]
        if len(plain) != featmaps[0].shape[0] or any(s[-1:] != (4,) for s in shapes):
            raise ValueError(
                f"MultiScaleRoIAlign: expected boxes [n, 4] or [1, n, 4] for each of "
                f"{featmaps[0].shape[0]} samples, got {shapes}"
            )
        flat = [box.reshape(-1, 4) for box in plain]
        samples = [box.new_full((len(box),), i, dtype=torch.long) for i, box in enumerate(flat)]
        return torch.cat(flat), torch.cat(samples)

    def settings(self) -> Any:
        """Arguments of `multi_scale_roi_align` after maps, boxes and samples."""
        scales = [1.0 / stride for stride in self.feature_strides]
        levels = float(self.canonical_scale), float(self.canonical_level)
        return self.output_size, scales, self.sampling_ratio, self.aligned, *levels

    def forward(self, featmaps: Sequence[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        """Align.

        Args:
            featmaps: ``[N, C, H_i, W_i]`` for each stride.
            boxes: For each sample ``[n, 4]`` or ``[1, n, 4]``: left, top, right, bottom, in pixels
                of the model's input.

        Returns:
            ``[boxes of all samples, C, *output_size]``.

        Raises:
            ValueError: Maps or boxes that do not fit.
        """
        return multi_scale_roi_align(featmaps, *self.placed(featmaps, boxes), *self.settings())

    extra_repr = showing("output_size", "feature_strides", "sampling_ratio", "aligned")
