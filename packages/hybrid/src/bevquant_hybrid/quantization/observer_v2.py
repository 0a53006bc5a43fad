"""Observers under their newer documented path, where extremes are averaged too."""

from __future__ import annotations

from typing import Any

import torch

from bevquant_hybrid._observers import MovingAveragePerChannelMinMaxObserver
from bevquant_hybrid.dtype import qint8
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

    def __init__(
        self,
        averaging_constant: float = 0.01,
        ch_axis: int = -1,
        dtype: str = qint8,
        qscheme: torch.qscheme = torch.per_tensor_symmetric,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_sync_quantize: bool = False,
        factory_kwargs: dict[str, Any] | None = None,
    ) -> None:
        given = dtype, qscheme, quant_min, quant_max, is_sync_quantize, factory_kwargs
        super().__init__(averaging_constant, ch_axis, *given)
