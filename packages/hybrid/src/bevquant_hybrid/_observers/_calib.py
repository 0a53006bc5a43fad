"""The observer of a calibration model: one histogram over all batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid._observers._range import RangeObserver, scale_of
from bevquant_hybrid.dtype import qint8
from bevquant_quantizers.calib import HistogramCalibrator

__all__ = ["CalibObserver"]


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
