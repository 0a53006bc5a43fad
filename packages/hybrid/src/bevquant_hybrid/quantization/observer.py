"""Observers under their documented path, with definitions of those that search a range."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid._observers import (
    AveragingObserver,
    CalibObserver,
    ClipObserver,
    FixedScaleObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    NoopObserver,
    PerChannelMinMaxObserver,
    scale_of,
)
from bevquant_quantizers.calib import HistogramCalibrator

__all__ = [
    "CalibObserver",
    "ClipObserver",
    "ClipStdObserver",
    "FixedScaleObserver",
    "KLObserver",
    "MSEObserver",
    "MinMaxObserver",
    "MixObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "MovingAveragePerTensorMinMaxObserver",
    "NoopObserver",
    "PerChannelMinMaxObserver",
    "PercentileObserver",
]

MovingAveragePerTensorMinMaxObserver = MovingAverageMinMaxObserver  # as one page names it


def _percentile_of(x: Tensor, percentile: float, bins: int) -> Tensor:
    """Lower edge of the bin of |x|'s histogram where `percentile` percent are reached, ``[1]``."""
    histogram = HistogramCalibrator(8, None, False, num_bins=bins)
    histogram.collect(x)
    amax = histogram.compute_amax("percentile", percentile=percentile)
    return x.new_zeros(1) if amax is None else amax.reshape(1).to(x)


class PercentileObserver(AveragingObserver):
    """The percentile of each tensor's absolute values, averaged; a symmetric range.

    Args:
        percentile: Percent of the values that lie within the range.
        bins: Bins of the histogram of |x|, from 0 to its maximum.

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
        amax = torch.cat([_percentile_of(row, self.percentile, self.bins) for row in rows])
        return -amax, amax


class ClipStdObserver(AveragingObserver):
    """Averaged extremes of each tensor, clipped at `std_scale` standard deviations from the mean.

    Args:
        std_scale: Standard deviations to keep.

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
        """Extremes, clipped at mean ± std_scale·σ."""
        low, high = super().measure(x)
        rows = self.rows(x)
        deviation, mean = torch.std_mean(rows, dim=1, correction=0)
        reach = self.std_scale * deviation
        return torch.maximum(low, mean - reach), torch.minimum(high, mean + reach)


def _least_error(x: Tensor, candidates: Iterable[Tensor], low: int, high: int) -> Tensor:
    """For each row of `x` the candidate amax ``[rows]`` with the least squared rounding error."""
    best, least = x.new_zeros(len(x)), x.new_full((len(x),), torch.inf)
    for amax in candidates:
        scale = scale_of(amax, low, high)[:, None]
        error = ((x / scale).round().clamp(low, high) * scale - x).square().sum(1)
        best, least = torch.where(error < least, amax, best), torch.minimum(error, least)
    return best


class _Search(AveragingObserver):
    """Base of observers that search a symmetric range for a tensor, or for each channel."""

    def search(self, x: Tensor, amax: Tensor) -> Tensor:
        """Best ranges of rows ``[rows, values]`` with largest absolute values `amax` ``[rows]``."""
        raise NotImplementedError

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """±best range."""
        rows = self.rows(x)
        amax = rows.abs().amax(1)
        if bool(amax.isfinite().all()):
            amax = self.search(rows.float(), amax.float())
        return -amax, amax


class MSEObserver(_Search):
    """Tries 1, 1 + stride, … percent of the maximum; selects the least squared error.

    The maximum itself is always tried.

    Args:
        stride: Percent between candidates, 1 to 100.

    Raises:
        ValueError: A stride outside 1…100.

    Example:
        >>> observer = MSEObserver()
        >>> _ = observer(torch.linspace(-1, 1, 1000))
        >>> observer.max_val
        tensor([1.])
    """

    def __init__(self, stride: int = 1, averaging_constant: float = 0.01, **kwargs: Any) -> None:
        super().__init__(averaging_constant, **kwargs)
        if not 1 <= stride <= 100:
            raise ValueError(f"MSEObserver: stride={stride}: expected 1 to 100")
        self.stride = stride

    def search(self, x: Tensor, amax: Tensor) -> Tensor:
        """Least squared error among shares of the maximum."""
        shares = {*range(1, 101, self.stride), 100}
        candidates = (amax * share / 100 for share in sorted(shares))
        return _least_error(x, candidates, self.quant_min, self.quant_max)


class KLObserver(AveragingObserver):
    """Least Kullback-Leibler divergence between a histogram and its quantized form.

    Args:
        bins: Bins of the histogram of |x|.
        update_interval: Tensors per histogram: a range is searched at every n-th tensor. Before the
            first search there is none.

    Raises:
        ValueError: Fewer bins than the type has levels above 0, an interval below 1, another type
            than qint8, or ranges per channel.

    Example:
        >>> observer = KLObserver()
        >>> _ = observer(torch.linspace(-1, 1, 10000))
        >>> 0.9 < observer.max_val.item() <= 1.0
        True
    """

    def __init__(
        self,
        bins: int = 512,
        update_interval: int = 1,
        averaging_constant: float = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(averaging_constant, **kwargs)
        if self.dtype.bits != 8:
            raise ValueError(
                f"KLObserver: dtype={self.dtype}: the divergence is searched for qint8"
            )
        if bins < 129 or update_interval < 1 or self.ch_axis >= 0:
            raise ValueError(
                f"KLObserver: bins={bins}, update_interval={update_interval}, ch_axis="
                f"{self.ch_axis}: expected at least 129 bins, an interval of at least 1 and one "
                "range per tensor"
            )
        self.bins, self.update_interval = bins, update_interval
        self._counted = 0
        self._histogram = HistogramCalibrator(8, None, False, num_bins=bins)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Count a tensor; search a range at every n-th.

        Raises:
            ValueError: NaN or infinite values.
        """
        if x.numel() == 0:
            return x
        self._histogram.collect(x.detach())
        self._counted += 1
        return x if self._counted < self.update_interval else super().forward(x)

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """±best range of the histogram, which is then reset."""
        found = self._histogram.compute_amax("entropy")
        amax = x.abs().amax().reshape(1) if found is None else found.reshape(1).to(x)
        self._counted = 0
        self._histogram = HistogramCalibrator(8, None, False, num_bins=self.bins)
        return -amax, amax


class MixObserver(_Search):
    """Selects among percentiles, the maximum and its best share by least squared error.

    Args:
        percentiles: Percentiles to try.
        bins: Bins of the histogram of |x|.

    Example:
        >>> observer = MixObserver()
        >>> _ = observer(torch.linspace(-1, 1, 1000))
        >>> observer.max_val
        tensor([1.])
    """

    def __init__(
        self,
        percentiles: tuple[float, ...] = (99.0, 99.9, 99.95, 99.99, 99.995, 99.999),
        bins: int = 2048,
        averaging_constant: float = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(averaging_constant, **kwargs)
        self.percentiles, self.bins = tuple(percentiles), bins

    def search(self, x: Tensor, amax: Tensor) -> Tensor:
        """Least squared error among the candidates."""
        found = [
            torch.cat([_percentile_of(row, percentile, self.bins) for row in x])
            for percentile in self.percentiles
        ]
        return _least_error(x, [*found, amax], self.quant_min, self.quant_max)
