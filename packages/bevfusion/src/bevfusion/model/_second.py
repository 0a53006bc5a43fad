"""The decoder over the bird's-eye view: SECOND's two scales, and the pyramid that joins them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from bevfusion.model._config import DecoderConfig


def _norm_relu(channels: int) -> tuple[nn.Module, nn.Module]:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01), nn.ReLU(inplace=True)


class SECOND(nn.Module):
    """The backbone of SECOND (Yan et al. 2018): one chain of 3×3 convolutions for each scale.

    Args:
        config: Sizes.
        in_channels: Channels of the map that is decoded.
    """

    def __init__(self, config: DecoderConfig, in_channels: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        width = in_channels
        for channels, layers, stride in zip(
            config.channels, config.layers, config.strides, strict=True
        ):
            members: list[nn.Module] = []
            for index in range(layers + 1):
                step = stride if index == 0 else 1
                members += [
                    nn.Conv2d(width, channels, 3, stride=step, padding=1, bias=False),
                    *_norm_relu(channels),
                ]
                width = channels
            self.blocks.append(nn.Sequential(*members))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map float [batch, in_channels, x, y] to one map for each scale, finest first."""
        maps = []
        for block in self.blocks:
            x = block(x)
            maps.append(x)
        return tuple(maps)


class SECONDFPN(nn.Module):
    """SECOND's neck: every scale brought to the finest one's size, then concatenated.

    A scale of stride 1 goes through a 1×1 convolution, one of stride s > 1 through a transposed
    convolution whose kernel and stride are s, one of 1/s through a convolution of that kernel and
    stride.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.deblocks = nn.ModuleList()
        for wide_in, wide_out, stride in zip(
            config.channels, config.upsample_channels, config.upsample_strides, strict=True
        ):
            kind = nn.ConvTranspose2d if stride > 1 else nn.Conv2d
            size = round(max(stride, 1 / stride))
            up = kind(wide_in, wide_out, size, stride=size, bias=False)
            self.deblocks.append(nn.Sequential(up, *_norm_relu(wide_out)))

    def forward(self, maps: tuple[Tensor, ...]) -> Tensor:
        """Join the maps of `SECOND` into float [batch, sum of upsample_channels, x, y]."""
        return torch.cat([deblock(maps[i]) for i, deblock in enumerate(self.deblocks)], 1)
