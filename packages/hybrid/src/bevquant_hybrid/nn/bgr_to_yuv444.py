"""BGR images to YUV, for preprocessing."""

from __future__ import annotations

from torch import Tensor, nn

from bevquant_hybrid.functional import bgr2yuv, rgb2yuv
from bevquant_hybrid.nn._functions import showing

__all__ = ["BgrToYuv444", "bgr_to_yuv444"]


def bgr_to_yuv444(input: Tensor, channel_reversal: bool = False) -> Tensor:
    """BGR to full-swing YUV444 of BT.601, the BPU's input; see `rgb2yuv`.

    Args:
        input: ``[N, 3, height, width]``, 0…255.
        channel_reversal: The input is RGB.

    Returns:
        YUV, 0…255, in the input's type.

    Example:
        >>> import torch
        >>> bgr_to_yuv444(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)).flatten()
        tensor([255, 128, 128], dtype=torch.uint8)
    """
    convert = rgb2yuv if channel_reversal else bgr2yuv
    return convert(input, "full").to(input.dtype)


class BgrToYuv444(nn.Module):
    """`bgr_to_yuv444` as a module.

    Args:
        channel_reversal: The input is RGB.
    """

    def __init__(self, channel_reversal: bool = False) -> None:
        super().__init__()
        self.channel_reversal = channel_reversal

    def forward(self, input: Tensor) -> Tensor:
        """Convert."""
        return bgr_to_yuv444(input, self.channel_reversal)

    extra_repr = showing("channel_reversal")
