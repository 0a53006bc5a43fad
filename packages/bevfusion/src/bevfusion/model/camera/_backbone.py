"""A bottleneck ResNet under mmdet's names, and mit-bevfusion's neck, which concatenates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

EXPANSION = 4


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolution and a skip connection (He et al. 2015, section 4.1).

    y = relu(bn3(conv3(h₂)) + s) with h₂ = relu(bn2(conv2(h₁))), h₁ = relu(bn1(conv1(x))), and
    s = x, or downsample(x) where stride or width change. The 3×3 convolution carries the stride
    (mmdet's style "pytorch").

    Args:
        in_channels: Channels of x.
        width: Channels of h₁ and h₂; y has four times as many.
        stride: 1 or 2.
    """

    def __init__(self, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        out_channels = EXPANSION * width
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Float [batch, in_channels, h, w] → float [batch, 4 · width, h / stride, w / stride]."""
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        identity = x if self.downsample is None else self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


class ResNet(nn.Module):
    """Stem and four stages; the outputs are those of stages 2, 3 and 4 (`out_indices` 1, 2, 3).

    Args:
        depths: Blocks of each stage; (3, 4, 6, 3) is ResNet-50.
        width: Channels of the stem. Stage i = 0…3 works at 2^i · width channels and puts out
            four times as many, at stride 4 · 2^i.

    Example:
        >>> import torch
        >>> net = ResNet((1, 1, 1, 1), 4).eval()
        >>> [tuple(y.shape) for y in net(torch.zeros(1, 3, 64, 96))]
        [(1, 32, 8, 12), (1, 64, 4, 6), (1, 128, 2, 3)]
    """

    def __init__(self, depths: tuple[int, int, int, int], width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        widths = [width * 2**stage for stage in range(4)]
        self.layer1 = _stage(width, widths[0], depths[0], stride=1)
        self.layer2 = _stage(EXPANSION * widths[0], widths[1], depths[1], stride=2)
        self.layer3 = _stage(EXPANSION * widths[1], widths[2], depths[2], stride=2)
        self.layer4 = _stage(EXPANSION * widths[2], widths[3], depths[3], stride=2)
        self.out_channels = tuple(EXPANSION * w for w in widths[1:])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Float [images, 3, height, width] → the maps at stride 8, 16 and 32."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer1(x)
        stride8 = self.layer2(x)
        stride16 = self.layer3(stride8)
        stride32 = self.layer4(stride16)
        return stride8, stride16, stride32


def _stage(in_channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(in_channels, width, stride)
    return nn.Sequential(first, *(Bottleneck(EXPANSION * width, width) for _ in range(blocks - 1)))


class _ConvNormAct(nn.Module):
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
            _ConvNormAct(in_channels[i] + above[i], out_channels, 1) for i in range(last)
        )
        self.fpn_convs = nn.ModuleList(
            _ConvNormAct(out_channels, out_channels, 3) for _ in range(last)
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
