"""Ranges from each tensor's distribution, averaged: percentile and standard deviation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid._observers._min_max import AveragingObserver
from bevquant_quantizers.calib import HistogramCalibrator

__all__ = ["ClipStdObserver", "PercentileObserver", "percentile_of"]


def percentile_of(x: Tensor, percentile: float, bins: int) -> Tensor:
    """Lower edge of the bin of |x|'s histogram where `percentile` percent are reached, ``[1]``.

    Raises:
        ValueError: NaN or infinite values.
    """
    histogram = HistogramCalibrator(8, None, False, num_bins=bins)
    histogram.collect(x)
    amax = histogram.compute_amax("percentile", percentile=percentile)
    return x.new_zeros(1) if amax is None else amax.reshape(1).to(x)


class PercentileObserver(AveragingObserver):
    """The percentile of each tensor's absolute values, averaged; a symmetric range.

    Args:
        percentile: Percent of the values that lie within the range.
        bins: Bins of the histogram of |x|, from 0 to its maximum.
        averaging_constant: As in `MovingAverageMinMaxObserver`.
        **kwargs: As in `RangeObserver`.

    Raises:
        ValueError: A percentile outside (0, 100], or no bins.

    Example:
        >>> observer = PercentileObserver(percentile=90.0)
        >>> _ = observer(torch.arange(101.0))
        >>> round(observer.max_val.item())
        90
    """

    def __init__(
        self,
        percentile: float = 99.99,
        bins: int = 2048,
        averaging_constant: float = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(averaging_constant, **kwargs)
        if not 0.0 < percentile <= 100.0 or bins < 1:
            raise ValueError(
                f"PercentileObserver: percentile={percentile}, bins={bins}: expected a percentile "
                "in (0, 100] and at least one bin"
            )
        self.percentile, self.bins = percentile, bins

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """±percentile, per tensor or channel."""
        rows = [x] if self.ch_axis < 0 else x.movedim(self.ch_axis, 0)
        amax = torch.cat([percentile_of(row, self.percentile, self.bins) for row in rows])
        return -amax, amax


class ClipStdObserver(AveragingObserver):
    """Extremes of each tensor, but within `std_scale` standard deviations of its mean, averaged.

    Args:
        std_scale: Standard deviations to keep.
        averaging_constant: As in `MovingAverageMinMaxObserver`.
        **kwargs: As in `RangeObserver`.

    Raises:
        ValueError: `std_scale` is not positive.

    Example:
        >>> observer = ClipStdObserver(std_scale=1.0)
        >>> _ = observer(torch.tensor([-1.0, -1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
        >>> observer
        ClipStdObserver(min_val=tensor([-0.7071]), max_val=tensor([0.7071]))
    """

    def __init__(
        self, std_scale: float = 3.0, averaging_constant: float = 0.01, **kwargs: Any
    ) -> None:
        super().__init__(averaging_constant, **kwargs)
        if not std_scale > 0:
            raise ValueError(f"ClipStdObserver: std_scale={std_scale}: expected a positive number")
        self.std_scale = std_scale

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Extremes, cut at mean ± std_scale·σ."""
        low, high = super().measure(x)
        rows = x.reshape(1, -1) if self.ch_axis < 0 else x.movedim(self.ch_axis, 0).flatten(1)
        deviation, mean = torch.std_mean(rows, dim=1, correction=0)
        reach = self.std_scale * deviation
        return torch.maximum(low, mean - reach), torch.minimum(high, mean + reach)
