"""What a convolution puts around its input."""

from __future__ import annotations

from typing import Any

__all__ = ["zero_padding"]


def zero_padding(conv: Any) -> tuple[tuple[int, int], ...]:
    """Zeros before and behind each axis, as torch's forward of Conv1d, 2d and 3d puts them.

    It reads `padding`, `dilation` and `kernel_size` when it runs, so these may be set after the
    layer was made (backbones of segmentation models get their dilation that way); what torch keeps
    for its other padding modes is then out of date.

    Args:
        conv: The layer; its padding is a number per axis, ``"same"`` or ``"valid"``.

    Example:
        >>> from torch import nn
        >>> conv = nn.Conv2d(1, 1, 3, padding=1)
        >>> conv.padding, conv.dilation = (2, 2), (2, 2)
        >>> zero_padding(conv)
        ((2, 2), (2, 2))
        >>> zero_padding(nn.Conv1d(1, 1, 4, padding="same"))
        ((1, 2),)
    """
    if conv.padding == "valid":
        return ((0, 0),) * len(conv.kernel_size)
    if conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((size, size) for size in conv.padding)
