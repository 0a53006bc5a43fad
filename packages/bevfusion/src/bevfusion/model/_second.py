"""The decoder over the bird's-eye view and the fuser of the camera's and the LiDAR's map.

The decoder has SECOND's two scales, and the pyramid that joins them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from bevfusion.model._config import DecoderConfig, FuserConfig


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
            # A stride of 1/2 is a convolution of stride 2.
            size = round(max(stride, 1 / stride))
            up = kind(wide_in, wide_out, size, stride=size, bias=False)
            self.deblocks.append(nn.Sequential(up, *_norm_relu(wide_out)))

    def forward(self, maps: tuple[Tensor, ...]) -> Tensor:
        """Join the maps of `SECOND` into float [batch, sum of upsample_channels, x, y]."""
        return torch.cat([deblock(maps[i]) for i, deblock in enumerate(self.deblocks)], 1)


class ConvFuser(nn.Module):
    """mit-bevfusion's ConvFuser: y = relu(bn(conv3×3(concat(camera, lidar)))).

    The members are called 0, 1 and 2, as those of the nn.Sequential that mit-bevfusion makes of
    them.
    """

    def __init__(self, config: FuserConfig) -> None:
        super().__init__()
        conv = nn.Conv2d(sum(config.in_channels), config.out_channels, 3, padding=1, bias=False)
        for index, member in enumerate(
            (conv, nn.BatchNorm2d(config.out_channels), nn.ReLU(inplace=True))
        ):
            self.add_module(str(index), member)

    def forward(self, camera: Tensor, lidar: Tensor) -> Tensor:
        """Fuse two maps.

        Args:
            camera: float [batch, camera channels, x, y].
            lidar: float [batch, LiDAR channels, x, y].

        Returns:
            float [batch, out_channels, x, y].
        """
        x = torch.cat([camera, lidar], 1)
        for name in ("0", "1", "2"):
            x = getattr(self, name)(x)
        return x
