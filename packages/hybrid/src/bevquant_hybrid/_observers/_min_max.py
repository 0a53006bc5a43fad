"""Observers of extremes, running, averaged or per channel, and the histogram of calibration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid._observers._range import RangeObserver, scale_of
from bevquant_hybrid.dtype import qint8
from bevquant_quantizers.calib import HistogramCalibrator


class MinMaxObserver(RangeObserver):
    """Smallest and largest value of everything seen.

    Example:
        >>> observer = MinMaxObserver()
        >>> _ = observer(torch.tensor([-2.0, 1.0])), observer(torch.tensor([0.0, 25.5]))
        >>> observer, observer.calculate_qparams()[0]
        (MinMaxObserver(min_val=tensor([-2.]), max_val=tensor([25.5000])), tensor([0.2000]))
    """


class PerChannelMinMaxObserver(MinMaxObserver):
    """`MinMaxObserver` with a range per channel of `ch_axis`."""

    def __init__(
        self,
        dtype: str = qint8,
        qscheme: torch.qscheme = torch.per_channel_symmetric,
        ch_axis: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dtype, qscheme, ch_axis=ch_axis, **kwargs)


class AveragingObserver(RangeObserver):
    r"""Base of observers that average bounds: :math:`v \leftarrow v + c\,(v_{new} - v)`.

    The first tensor sets the range. c = 0 freezes it, c = 1 forgets what was before.

    Args:
        averaging_constant: c, within [0, 1].
        dtype: As in `RangeObserver`, like all that follow.
        qscheme: Per tensor or per channel.
        quant_min: Smallest integer.
        quant_max: Largest integer.
        is_sync_quantize: Join ranges over processes.
        factory_kwargs: Of the buffers.
        ch_axis: Channel axis.

    Raises:
        ValueError: c outside [0, 1].
    """

    def __init__(
        self,
        averaging_constant: float = 0.01,
        dtype: str = qint8,
        qscheme: torch.qscheme = torch.per_tensor_symmetric,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_sync_quantize: bool = False,
        factory_kwargs: dict[str, Any] | None = None,
        ch_axis: int = -1,
    ) -> None:
        if not 0.0 <= averaging_constant <= 1.0:
            raise ValueError(
                f"{type(self).__name__}: averaging_constant={averaging_constant}: expected 0 to 1"
            )
        super().__init__(
            dtype, qscheme, quant_min, quant_max, ch_axis, is_sync_quantize, factory_kwargs
        )
        self.averaging_constant = averaging_constant

    def combine(self, old: Tensor, new: Tensor, largest: bool) -> Tensor:
        """Move the kept bound towards the new one."""
        return old + self.averaging_constant * (new - old)


class MovingAverageMinMaxObserver(AveragingObserver):
    """Extremes of each tensor, averaged.

    Example:
        >>> observer = MovingAverageMinMaxObserver(averaging_constant=0.5)
        >>> for top in (1.0, 3.0):
        ...     _ = observer(torch.tensor([0.0, top]))
        >>> observer
        MovingAverageMinMaxObserver(min_val=tensor([0.]), max_val=tensor([2.]))
    """


class MovingAveragePerChannelMinMaxObserver(AveragingObserver):
    """Extremes of each channel of `ch_axis`, averaged; the default for weights.

    Example:
        >>> observer = MovingAveragePerChannelMinMaxObserver()
        >>> _ = observer(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
        >>> observer.max_val
        tensor([1., 4.])
    """

    def __init__(
        self,
        averaging_constant: float = 0.01,
        ch_axis: int = 0,
        dtype: str = qint8,
        qscheme: torch.qscheme = torch.per_channel_symmetric,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_sync_quantize: bool = False,
        factory_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            averaging_constant,
            dtype,
            qscheme,
            quant_min,
            quant_max,
            is_sync_quantize,
            factory_kwargs,
            ch_axis,
        )


class CalibObserver(RangeObserver):
    """Histogram of absolute values over every batch; the range is a percentile of it.

    The first batch's maximum sets the width of the bins; larger values append bins. The range is
    the lower edge of the bin where the percentile is reached.

    Args:
        dtype: ``qint8`` or ``qint16``.
        percentile: Percent of the values that lie within the range.
        bins: Bins of the first batch.
        **kwargs: As in `RangeObserver`.

    Raises:
        ValueError: A percentile outside (0, 100], no bins, or a scheme per channel.

    Example:
        >>> observer = CalibObserver()
        >>> observer
        CalibObserver(CalibObserver() calib_bin_edges=tensor([]) calib_hist=tensor([]))
        >>> _ = observer(torch.linspace(0, 1, 100_000))
        >>> amax = observer.calculate_qparams()[0] * 127.5
        >>> f"{amax.item():.4f}"
        '0.9995'
    """

    def __init__(
        self, dtype: str = qint8, percentile: float = 99.99, bins: int = 2048, **kwargs: Any
    ) -> None:
        super().__init__(dtype, **kwargs)
        if not 0.0 < percentile <= 100.0 or bins < 1 or self.ch_axis >= 0:
            raise ValueError(
                f"CalibObserver: percentile={percentile}, bins={bins}, ch_axis={self.ch_axis}: "
                "expected a percentile in (0, 100], at least one bin and one range per tensor"
            )
        # Its bounds follow from the histogram: they are no state of their own.
        del self.min_val, self.max_val
        self.percentile = percentile
        self._histogram = HistogramCalibrator(8, None, False, num_bins=bins)

    @property
    def observed(self) -> bool:
        """Whether any batch was counted."""
        return self.calib_hist.numel() > 0

    @property
    def calib_hist(self) -> Tensor:
        """Counts, int64 ``[bins]``; empty at the start."""
        counts = self._histogram._calib_hist
        return counts if isinstance(counts, Tensor) else torch.tensor([])

    @property
    def calib_bin_edges(self) -> Tensor:
        """Edges of the bins, ``[bins + 1]``; empty at the start."""
        edges = self._histogram._calib_bin_edges
        return edges if isinstance(edges, Tensor) else torch.tensor([])

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Count a batch and return it as it came.

        Raises:
            ValueError: NaN or infinite values.
        """
        self._histogram.collect(x)
        return x

    def set_range(self, amax: Tensor) -> None:
        """Refuse: a histogram has the range that was counted."""
        raise TypeError("CalibObserver: its range follows from the batches; run them instead")

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return scale and zero point, both ``[1]``; scale 1 where nothing was counted."""
        amax = self._histogram.compute_amax("percentile", percentile=self.percentile)
        scale = torch.ones(1)
        if amax is not None:
            scale = scale_of(amax.reshape(1), self.quant_min, self.quant_max)
        return scale, torch.zeros_like(scale, dtype=torch.long)

    def extra_repr(self) -> str:
        return (
            f"CalibObserver() calib_bin_edges={self.calib_bin_edges} calib_hist={self.calib_hist}"
        )
