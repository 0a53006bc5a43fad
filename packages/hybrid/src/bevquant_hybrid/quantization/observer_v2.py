"""Observers under their newer documented path, where extremes are averaged too."""

from __future__ import annotations

import torch

from bevquant_hybrid._observers import MovingAveragePerChannelMinMaxObserver, axis_before_type
from bevquant_hybrid.quantization.observer import (
    ClipObserver,
    ClipStdObserver,
    FixedScaleObserver,
    KLObserver,
    MixObserver,
    MSEObserver,
    PercentileObserver,
)

__all__ = [
    "ClipObserver",
    "ClipStdObserver",
    "FixedScaleObserver",
    "KLObserver",
    "MSEObserver",
    "MinMaxObserver",
    "MixObserver",
    "PercentileObserver",
]


class MinMaxObserver(MovingAveragePerChannelMinMaxObserver):
    """Extremes of each tensor or channel, averaged; arguments as in `AveragingObserver`.

    Example:
        >>> observer = MinMaxObserver(0.5)
        >>> for top in (1.0, 3.0):
        ...     _ = observer(torch.tensor([0.0, top]))
        >>> observer
        MinMaxObserver(min_val=tensor([0.]), max_val=tensor([2.]))
    """

    __init__ = axis_before_type(-1, torch.per_tensor_symmetric)
