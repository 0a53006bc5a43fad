"""Ranges searched by their quantization error: mse, kl, and a mixture of candidates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from bevquant_hybrid._observers._min_max import AveragingObserver
from bevquant_hybrid._observers._range import scale_of
from bevquant_hybrid._observers._statistics import percentile_of
from bevquant_quantizers.calib import HistogramCalibrator

__all__ = ["KLObserver", "MSEObserver", "MixObserver"]


def _least_error(x: Tensor, candidates: Iterable[Tensor], low: int, high: int) -> Tensor:
    """The candidate amax ``[1]`` whose quantized tensor is nearest to `x` (sum of squares)."""
    best, least = x.new_zeros(1), float("inf")
    for amax in candidates:
        scale = scale_of(amax, low, high)
        error = float(((x / scale).round().clamp(low, high) * scale - x).square().sum())
        if error < least:
            best, least = amax, error
    return best


class _PerTensorSearch(AveragingObserver):
    """Base of observers that search one symmetric range per tensor."""

    def __init__(self, averaging_constant: float = 0.01, **kwargs: Any) -> None:
        super().__init__(averaging_constant, **kwargs)
        if self.ch_axis >= 0:
            raise ValueError(
                f"{type(self).__name__} searches one range per tensor; for weights per channel "
                "take MovingAveragePerChannelMinMaxObserver"
            )

    def search(self, x: Tensor, amax: Tensor) -> Tensor:
        """Best range of a tensor with largest absolute value `amax`, both ``[1]``."""
        raise NotImplementedError

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """±best range."""
        amax = x.abs().amax().reshape(1)
        if bool(amax.isfinite()):
            amax = self.search(x.float(), amax.float())
        return -amax, amax


class MSEObserver(_PerTensorSearch):
    """Tries 1, 1 + stride, … percent of the maximum; the least squared error wins.

    The maximum itself is always tried.

    Args:
        stride: Percent between candidates, 1 to 100.
        averaging_constant: As in `MovingAverageMinMaxObserver`.
        **kwargs: As in `RangeObserver`.

    Raises:
        ValueError: A stride outside 1…100.

    Example:
        >>> import torch
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


class KLObserver(_PerTensorSearch):
    """Least Kullback-Leibler divergence between the histogram and its quantized form.

    Args:
        bins: Bins of the histogram of |x|.
        update_interval: Search at every n-th tensor only, the first included.
        averaging_constant: As in `MovingAverageMinMaxObserver`.
        **kwargs: As in `RangeObserver`.

    Raises:
        ValueError: Fewer bins than the type has levels above 0, or an interval below 1.

    Example:
        >>> import torch
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
        if bins < 129 or update_interval < 1:
            raise ValueError(
                f"KLObserver: bins={bins}, update_interval={update_interval}: expected at least "
                "129 bins and an interval of at least 1"
            )
        self.bins, self.update_interval = bins, update_interval
        self._seen = 0

    def search(self, x: Tensor, amax: Tensor) -> Tensor:
        """Search the histogram, or keep the range where this tensor's turn has not come."""
        self._seen += 1
        if self.observed and (self._seen - 1) % self.update_interval:
            return self.max_val
        histogram = HistogramCalibrator(8, None, False, num_bins=self.bins)
        histogram.collect(x)
        found = histogram.compute_amax("entropy")
        return amax if found is None else found.reshape(1).to(x)


class MixObserver(_PerTensorSearch):
    """Percentiles, the maximum and the best share of it as candidates; least squared error wins.

    Args:
        percentiles: Percentiles to try.
        bins: Bins of the histogram of |x|.
        averaging_constant: As in `MovingAverageMinMaxObserver`.
        **kwargs: As in `RangeObserver`.

    Example:
        >>> import torch
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
        found = [percentile_of(x, percentile, self.bins) for percentile in self.percentiles]
        return _least_error(x, [*found, amax], self.quant_min, self.quant_max)
