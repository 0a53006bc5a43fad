"""mit-bevfusion's top-down neck, which concatenates where an FPN adds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

__all__ = ["GeneralizedLSSFPN"]


class ConvNormAct(nn.Module):
    """activate(bn(conv(x))), with mmcv ConvModule's names."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False
        )
        self.bn = nn.BatchNorm2d(out_channels)
        self.activate = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Float [batch, in_channels, h, w] → float [batch, out_channels, h, w]."""
        out: Tensor = self.activate(self.bn(self.conv(x)))
        return out


class GeneralizedLSSFPN(nn.Module):
    """From the coarsest map down: enlarge, concatenate with the next finer one, convolve.

    `z_i = fpn_convs[i](lateral_convs[i](concat(x_i, up(z_{i+1}))))`, with z of the last level being
    its x. The enlargement is bilinear with corners not aligned, as mit-bevfusion's camera+lidar
    configurations set it (the class's own default there is aligned). The last level has no output.

    Args:
        in_channels: Channels of each level, finest first.
        out_channels: Channels of every output.

    Example:
        >>> neck = GeneralizedLSSFPN((8, 16, 32), 4).eval()
        >>> sizes = [(1, 8, 8, 12), (1, 16, 4, 6), (1, 32, 2, 3)]
        >>> [tuple(y.shape) for y in neck([torch.zeros(s) for s in sizes])]
        [(1, 4, 8, 12), (1, 4, 4, 6)]
    """

    def __init__(self, in_channels: Sequence[int], out_channels: int) -> None:
        super().__init__()
        last = len(in_channels) - 1
        above = [in_channels[last] if i == last - 1 else out_channels for i in range(last)]
        self.lateral_convs = nn.ModuleList(
            ConvNormAct(in_channels[i] + above[i], out_channels, 1) for i in range(last)
        )
        self.fpn_convs = nn.ModuleList(
            ConvNormAct(out_channels, out_channels, 3) for _ in range(last)
        )

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Maps of every level, finest first → one output per level but the last, finest first.

        The view transform reads the first output.
        """
        levels = len(self.lateral_convs)
        x = inputs[levels]
        outputs: list[Tensor] = []
        for i in reversed(range(levels)):
            enlarged = interpolate(
                x, size=inputs[i].shape[2:], mode="bilinear", align_corners=False
            )
            x = torch.cat([inputs[i], enlarged], dim=1)
            x = self.fpn_convs[i](self.lateral_convs[i](x))
            outputs.insert(0, x)
        return tuple(outputs)
