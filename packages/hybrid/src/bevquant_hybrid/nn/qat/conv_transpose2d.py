"""Transposed convolutions that train quantized."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_hybrid.nn.qat._weighted import Weighted, repeat_groups

__all__ = [
    "ConvTranspose2d",
    "ConvTransposeAdd2d",
    "ConvTransposeAddReLU2d",
    "ConvTransposeAddReLU62d",
    "ConvTransposeReLU2d",
    "ConvTransposeReLU62d",
]


class ConvTranspose2d(Weighted, nn.ConvTranspose2d):  # type: ignore[misc]
    """Transposed convolution with a quantized weight (a scale per axis 1) and output."""

    channel_axis = 1

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve."""
        return F.conv_transpose2d(
            x,
            weight,
            bias,
            self.stride,
            cast(tuple[int, ...], self.padding),
            self.output_padding,
            self.groups,
            self.dilation,
        )

    def scale_of_channels(self, scale: Tensor) -> Tensor:
        """Groups share the scales of axis 1."""
        return repeat_groups(scale, self.groups)


class ConvTransposeReLU2d(ConvTranspose2d, activation="relu"):
    """Transposed convolution, ReLU."""


class ConvTransposeReLU62d(ConvTranspose2d, activation="relu6"):
    """Transposed convolution, ReLU6."""


class ConvTransposeAdd2d(ConvTranspose2d, adds=True):
    """Transposed convolution, addition of a second input."""


class ConvTransposeAddReLU2d(ConvTransposeAdd2d, activation="relu"):
    """Transposed convolution, addition, ReLU."""


class ConvTransposeAddReLU62d(ConvTransposeAdd2d, activation="relu6"):
    """Transposed convolution, addition, ReLU6."""
