"""Swin transformer (Liu et al. 2021) for images of one size, under mmdet's names.

Maps lie channels last, [images, rows, columns, channels], from the patches to the outputs.

Window positions p and q of a w×w window attend to each other with the bias table[i(p, q)], where
i(p, q) = (p_row − q_row + w − 1)·(2w − 1) + p_column − q_column + w − 1. The size of the images is
fixed, so that masks are constants and every shape is known when the network is traced or exported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from bev_data import InputError

_HEAD_WIDTH = 32  # channels of a head, in every size of the paper
_MLP_RATIO = 4
_MASKED = -100.0  # added to the logits of pairs from different regions, as mmdet does

Size = tuple[int, int]


class SwinTransformer(nn.Module):
    """Patches, four stages; the outputs are those of stages 2, 3 and 4 (`out_indices` 1, 2, 3).

    Args:
        image_size: Height and width of the images, in pixels.
        depths: Blocks of each stage; (2, 2, 6, 2) is Swin-T.
        width: Channels of the first stage, a multiple of 32; 96 is Swin-T. Stage i = 0…3 has
            2^i · width channels in heads of 32, at stride 4 · 2^i.
        window: Rows and columns of a window.

    Raises:
        InputError: A width that does not divide into heads, or images that do not into patches.

    Example:
        >>> import torch
        >>> net = SwinTransformer((64, 96), (1, 1, 1, 1), 32).eval()
        >>> [tuple(y.shape) for y in net(torch.zeros(1, 3, 64, 96))]
        [(1, 64, 8, 12), (1, 128, 4, 6), (1, 256, 2, 3)]
    """

    fixed_size: ClassVar[bool] = True
    """It takes images of one size, not a part of one."""

    def __init__(
        self, image_size: Size, depths: Sequence[int], width: int, window: int = 7
    ) -> None:
        super().__init__()
        if width < 1 or width % _HEAD_WIDTH:
            raise InputError(
                f"width is {width}: a Swin transformer has heads of {_HEAD_WIDTH} channels; give a "
                f"multiple of {_HEAD_WIDTH} (96 is Swin-T)"
            )
        if image_size[0] % 4 or image_size[1] % 4:
            raise InputError(
                f"image_size is {image_size}: the patches of a Swin transformer have 4×4 pixels; "
                "give multiples of 4"
            )
        size = _shrunk(image_size, 4)
        widths = [width * 2**stage for stage in range(4)]
        self.patch_embed = _PatchEmbed(width)
        self.stages = nn.ModuleList()
        for stage, (channels, depth) in enumerate(zip(widths, depths, strict=True)):
            self.stages.append(_Stage(size, channels, depth, window, merges=stage < 3))
            size = _shrunk(size, 2)
        self.norm1 = nn.LayerNorm(widths[1])
        self.norm2 = nn.LayerNorm(widths[2])
        self.norm3 = nn.LayerNorm(widths[3])
        self.out_channels = tuple(widths[1:])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Float [images, 3, height, width] → the maps at stride 8, 16 and 32, channels first."""
        _, x = self.stages[0](self.patch_embed(x))
        stride8, x = self.stages[1](x)
        stride16, x = self.stages[2](x)
        stride32, _ = self.stages[3](x)
        return (
            self.norm1(stride8).permute(0, 3, 1, 2).contiguous(),
            self.norm2(stride16).permute(0, 3, 1, 2).contiguous(),
            self.norm3(stride32).permute(0, 3, 1, 2).contiguous(),
        )


class _PatchEmbed(nn.Module):
    """LayerNorm(linear map of each 4×4 patch)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, channels, 4, stride=4)
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Float [images, 3, height, width] → float [images, height / 4, width / 4, channels]."""
        out: Tensor = self.norm(self.projection(x).permute(0, 2, 3, 1))
        return out


class _Stage(nn.Module):
    """Blocks, every second one with shifted windows, then the merging of 2×2 positions."""

    def __init__(self, size: Size, channels: int, depth: int, window: int, merges: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            _Block(size, channels, window, (window // 2) * (block % 2)) for block in range(depth)
        )
        self.downsample = _PatchMerging(size, channels) if merges else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Float [images, rows, columns, channels] → the same, and the next stage's input."""
        for block in self.blocks:
            x = block(x)
        return x, x if self.downsample is None else self.downsample(x)


class _Block(nn.Module):
    """y = x + attention(norm1(x)); z = y + ffn(norm2(y))."""

    def __init__(self, size: Size, channels: int, window: int, shift: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.attn = _ShiftedWindows(size, channels, window, shift)
        self.norm2 = nn.LayerNorm(channels)
        self.ffn = _FeedForward(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Float [images, rows, columns, channels] → the same shape."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.ffn(self.norm2(x))
        return out


class _FeedForward(nn.Module):
    """linear(gelu(linear(x))), with the names of mmcv's FFN."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = _MLP_RATIO * channels
        self.layers = nn.Sequential(
            nn.Sequential(nn.Linear(channels, hidden), nn.GELU()), nn.Linear(hidden, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Float [..., channels] → the same shape."""
        out: Tensor = self.layers(x)
        return out


class _ShiftedWindows(nn.Module):
    """Pads to whole windows, rolls by −shift, attends inside the windows, and undoes both."""

    mask: Tensor | None

    def __init__(self, size: Size, channels: int, window: int, shift: int) -> None:
        super().__init__()
        self.size, self.window, self.shift = size, window, shift
        self.grid = _shrunk(size, window)
        self.w_msa = _WindowAttention(channels, window)
        # Pairs that the roll brought together from opposite edges do not attend to each other.
        mask = _mask(self.grid, window, shift) if shift else None
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Float [images, rows, columns, channels] → the same shape."""
        (rows, columns), window = self.grid, self.window
        # Padded positions are zeros and take part in the attention, as in mmdet.
        x = _padded(x, self.size, window)
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.unflatten(1, (rows, window)).unflatten(3, (columns, window)).transpose(2, 3)
        x = self.w_msa(x.flatten(3, 4).flatten(1, 2), self.mask)
        x = x.unflatten(1, (rows, columns)).unflatten(3, (window, window)).transpose(2, 3)
        x = x.flatten(3, 4).flatten(1, 2)
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        return x[:, : self.size[0], : self.size[1]]


class _WindowAttention(nn.Module):
    """softmax(q·kᵀ / √32 + bias + mask)·v, then a linear map (Liu et al. 2021, equation 4)."""

    relative_position_index: Tensor

    def __init__(self, channels: int, window: int) -> None:
        super().__init__()
        self.heads = channels // _HEAD_WIDTH
        table = torch.empty((2 * window - 1) ** 2, self.heads)
        self.relative_position_bias_table = nn.Parameter(nn.init.trunc_normal_(table, std=0.02))
        self.register_buffer("relative_position_index", relative_positions(window))
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attend inside each window of float [images, windows, window², channels]."""
        qkv = self.qkv(x).unflatten(3, (3, self.heads, _HEAD_WIDTH)).permute(3, 0, 1, 4, 2, 5)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weight = (q * _HEAD_WIDTH**-0.5) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index]
        weight = weight + bias.permute(2, 0, 1)
        if mask is not None:
            weight = weight + mask
        y = (weight.softmax(-1) @ v).transpose(2, 3).flatten(3)
        out: Tensor = self.proj(y)
        return out


class _PatchMerging(nn.Module):
    """linear(LayerNorm(the 2×2 positions of a cell)): half the rows and columns, twice as wide."""

    def __init__(self, size: Size, channels: int) -> None:
        super().__init__()
        self.size, self.cells = size, _shrunk(size, 2)
        self.norm = nn.LayerNorm(4 * channels)
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Float [images, rows, columns, channels] → [images, rows / 2, columns / 2, 2 channels]."""
        rows, columns = self.cells
        # A channel's four positions lie side by side, as `nn.Unfold` puts them; an odd row or
        # column is padded with zeros.
        x = _padded(x, self.size, 2).unflatten(1, (rows, 2)).unflatten(3, (columns, 2))
        out: Tensor = self.reduction(self.norm(x.permute(0, 1, 3, 5, 2, 4).flatten(3)))
        return out


def relative_positions(window: int) -> Tensor:
    """The row of the bias table of each pair of positions, int64 [window², window²].

    Example:
        >>> relative_positions(2).tolist()
        [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]
    """
    steps = torch.arange(window)
    row, column = (axis.flatten() for axis in torch.meshgrid(steps, steps, indexing="ij"))
    rows = row[:, None] - row + window - 1
    return rows * (2 * window - 1) + column[:, None] - column + window - 1


def _mask(grid: Size, window: int, shift: int) -> Tensor:
    """Float [windows, 1, window², window²]: 0 inside a region of the rolled map, else −100."""
    rows, columns = (_regions(count * window, window, shift) for count in grid)
    regions = (rows[:, None] * 3 + columns).unflatten(0, (-1, window)).unflatten(2, (-1, window))
    pairs = regions.transpose(1, 2).reshape(-1, 1, window * window)
    other: Tensor = pairs[..., None, :] != pairs[..., :, None]
    return other.float() * _MASKED


def _regions(length: int, window: int, shift: int) -> Tensor:
    """Along one axis of the rolled map: 0 up to the last window, 1 and 2 in it."""
    place = torch.arange(length)
    return (place >= length - window).long() + (place >= length - shift).long()


def _shrunk(size: Size, factor: int) -> Size:
    return -(-size[0] // factor), -(-size[1] // factor)


def _padded(x: Tensor, size: Size, multiple: int) -> Tensor:
    """Zeros below and to the right of [images, rows, columns, channels], up to whole multiples."""
    below, right = -size[0] % multiple, -size[1] % multiple
    return pad(x, (0, 0, 0, right, 0, below)) if below or right else x
