"""Observers, which measure the range of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.ao.quantization import ObserverBase

from bevquant_hybrid.dtype import as_quant_dtype, qinfo, qint8
from bevquant_quantizers.calib import HistogramCalibrator

_PER_CHANNEL = (torch.per_channel_symmetric, torch.per_channel_affine)
smallest_scale = torch.finfo(torch.float32).eps


def scale_of(amax: Tensor, quant_min: int, quant_max: int) -> Tensor:
    r"""Scale of a symmetric range: :math:`s = 2\,a / (q_\max - q_\min)`, a/127.5 for int8."""
    # A range of zeros has the smallest scale, 2⁻²³: nothing is divided by 0.
    return (amax * 2 / (quant_max - quant_min)).clamp(min=smallest_scale)


def resize_to_loaded(module: Any, state_dict: Mapping[str, Any], prefix: str, *names: str) -> None:
    """Give tensors of a module the shapes of a state: they are unknown before the first tensor."""
    for name in names:
        loaded, present = state_dict.get(prefix + name), getattr(module, name)
        if loaded is not None and loaded.shape != present.shape:
            present.data = torch.empty_like(loaded, dtype=present.dtype, device=present.device)


class RangeObserver(ObserverBase):
    r"""Base of observers that keep ``min_val`` and ``max_val``.

    :math:`s = \max(|\min|, |\max|) \cdot 2 / (q_\max - q_\min)`, zero point 0. Before the first
    observation the range is empty, [∞, −∞], and the scale 1. Empty tensors change nothing.

    Args:
        dtype: ``qint8`` or ``qint16``, or its name.
        qscheme: ``torch.per_tensor_symmetric`` or ``torch.per_channel_symmetric``.
        quant_min: Smallest integer; None for the type's.
        quant_max: Largest integer; None for the type's.
        ch_axis: Channel axis of per-channel ranges.
        is_sync_quantize: Join ranges over the processes of ``torch.distributed``.
        factory_kwargs: Device and dtype of the buffers, as for torch's observers.
    """

    def __init__(
        self,
        dtype: str = qint8,
        qscheme: torch.qscheme = torch.per_tensor_symmetric,
        quant_min: int | None = None,
        quant_max: int | None = None,
        ch_axis: int = -1,
        is_sync_quantize: bool = False,
        factory_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(dtype=as_quant_dtype(dtype))
        if qscheme not in (torch.per_tensor_symmetric, torch.per_channel_symmetric):
            raise ValueError(
                f"{type(self).__name__}: qscheme={qscheme}: a BPU computes with zero point 0; "
                "expected torch.per_tensor_symmetric or torch.per_channel_symmetric"
            )
        info = qinfo(self.dtype)
        self.qscheme = qscheme
        self.quant_min = info.min if quant_min is None else quant_min
        self.quant_max = info.max if quant_max is None else quant_max
        self.ch_axis = ch_axis if qscheme in _PER_CHANNEL else -1
        self.is_sync_quantize = is_sync_quantize
        empty = torch.full((1,), torch.inf, **(factory_kwargs or {}))
        self.min_val: Tensor
        self.max_val: Tensor
        self.register_buffer("min_val", empty)
        self.register_buffer("max_val", -empty)

    @property
    def observed(self) -> bool:
        """Whether any value was seen, or a range was set."""
        return bool((self.min_val <= self.max_val).all())

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Range of one tensor, ``[1]`` or ``[channels]``; by default its extremes."""
        low, high = torch.aminmax(self.rows(x), dim=1)
        return low, high

    def rows(self, x: Tensor) -> Tensor:
        """One row of values per range: ``[1, values]`` or ``[channels, values]``."""
        return x.reshape(1, -1) if self.ch_axis < 0 else x.movedim(self.ch_axis, 0).flatten(1)

    def combine(self, old: Tensor, new: Tensor, largest: bool) -> Tensor:
        """Combine the kept bound with a new tensor's; by default the wider one."""
        return torch.maximum(old, new) if largest else torch.minimum(old, new)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Observe a tensor and return it unchanged."""
        if x.numel() == 0:
            return x
        low, high = (bound.to(self.min_val.dtype) for bound in self.measure(x.detach()))
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise ValueError(
                f"{type(self).__name__}: a tensor of shape {tuple(x.shape)} holds NaN or infinite "
                "values, which give no range; find where they arise, or leave this batch out"
            )
        low, high = self._synchronized(low, high)
        # The first tensor replaces the empty range, which may have another shape.
        if self.observed and low.shape == self.min_val.shape:
            low = self.combine(self.min_val, low, largest=False)
            high = self.combine(self.max_val, high, largest=True)
        self.min_val, self.max_val = low, high
        return x

    def _synchronized(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        dist = torch.distributed
        if self.is_sync_quantize and dist.is_available() and dist.is_initialized():
            # Collective operations take contiguous tensors alone.
            low, high = low.contiguous(), high.contiguous()
            dist.all_reduce(low, dist.ReduceOp.MIN)
            dist.all_reduce(high, dist.ReduceOp.MAX)
        return low, high

    def set_range(self, amax: Tensor) -> None:
        """Set the range to ±`amax`, ``[1]`` or ``[channels]``."""
        amax = amax.detach().reshape(-1).to(self.min_val)
        self.min_val, self.max_val = -amax, amax.clone()

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return scale and zero point, ``[1]`` or ``[channels]``."""
        if not self.observed:
            scale = torch.ones_like(self.min_val)
        else:
            amax = torch.maximum(self.min_val.abs(), self.max_val.abs())
            scale = scale_of(amax, self.quant_min, self.quant_max)
        return scale, torch.zeros_like(scale, dtype=torch.long)

    def extra_repr(self) -> str:
        return f"min_val={self.min_val}, max_val={self.max_val}"

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        resize_to_loaded(self, state_dict, prefix, "min_val", "max_val")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class FixedScaleObserver(RangeObserver):
    """A fixed scale, such as 1/128 for pictures in [−1, 1).

    Args:
        scale: Value of one integer step, positive.
        zero_point: 0, the only allowed value.
        averaging_constant: Accepted, as of the observer that this one replaces.

    Raises:
        ValueError: A scale that is not positive and finite, or another zero point.

    Example:
        >>> FixedScaleObserver(scale=1 / 128).calculate_qparams()[0]
        tensor([0.0078])
    """

    def __init__(
        self,
        scale: float,
        zero_point: int = 0,
        averaging_constant: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        value = torch.as_tensor(scale, dtype=torch.float32).reshape(-1)
        if not bool((value.isfinite() & (value > 0)).all()) or zero_point:
            raise ValueError(
                f"FixedScaleObserver: scale={scale}, zero_point={zero_point}: expected a positive, "
                "finite scale and zero point 0"
            )
        self.fixed_scale = value
        self.set_range(value * (self.quant_max - self.quant_min) / 2)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the tensor; nothing is observed."""
        return x

    def set_range(self, amax: Tensor) -> None:
        """Do nothing: the scale is fixed."""
        super().set_range(self.fixed_scale * (self.quant_max - self.quant_min) / 2)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the fixed scale and 0."""
        scale = self.fixed_scale.to(self.min_val.device)
        return scale, torch.zeros_like(scale, dtype=torch.long)


class ClipObserver(RangeObserver):
    """Extremes of all observed values, clipped to [xmin, xmax].

    Args:
        xmin: Smallest bound.
        xmax: Largest bound.
        averaging_constant: Accepted, as of the observer that this one replaces.

    Raises:
        ValueError: xmin is not below xmax.

    Example:
        >>> observer = ClipObserver(xmin=-1.0, xmax=2.0)
        >>> _ = observer(torch.tensor([-0.5, 7.0]))
        >>> observer
        ClipObserver(min_val=tensor([-0.5000]), max_val=tensor([2.]))
    """

    def __init__(
        self,
        xmin: float = -1.0,
        xmax: float = 1.0,
        averaging_constant: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not xmin < xmax:
            raise ValueError(f"ClipObserver: xmin={xmin} must be below xmax={xmax}")
        self.xmin, self.xmax = xmin, xmax

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Clipped extremes."""
        low, high = super().measure(x)
        # Clipped, an infinite value would pass as a range; `forward` refuses it.
        if not bool((low.isfinite() & high.isfinite()).all()):
            return low, high
        return low.clamp(self.xmin, self.xmax), high.clamp(self.xmin, self.xmax)


class NoopObserver(torch.nn.Module):
    """Observes nothing, for weights: their range needs no calibration.

    Example:
        >>> NoopObserver(dtype=qint8)
        NoopObserver()
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.dtype = kwargs.get("dtype", qint8)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tensor."""
        return x


class MinMaxObserver(RangeObserver):
    """Smallest and largest observed value.

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

    The first tensor sets the range. c = 0 freezes it; c = 1 uses the latest tensor alone.

    Args:
        averaging_constant: c, within [0, 1]; the others are those of `RangeObserver`.
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


def axis_before_type(ch_axis: int, qscheme: torch.qscheme) -> Any:
    """A constructor of an `AveragingObserver` with these defaults, the axis as second argument."""

    def __init__(
        self: AveragingObserver,
        averaging_constant: float = 0.01,
        ch_axis: int = ch_axis,
        dtype: str = qint8,
        qscheme: torch.qscheme = qscheme,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_sync_quantize: bool = False,
        factory_kwargs: dict[str, Any] | None = None,
    ) -> None:
        given = dtype, qscheme, quant_min, quant_max, is_sync_quantize, factory_kwargs
        AveragingObserver.__init__(self, averaging_constant, *given, ch_axis)

    return __init__


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

    __init__ = axis_before_type(0, torch.per_channel_symmetric)


class CalibObserver(RangeObserver):
    """Histogram of absolute values over all batches; the range is a percentile of it.

    The first batch's maximum sets the width of the bins; larger values append bins. The range is
    the lower edge of the bin where the percentile is reached.

    Args:
        dtype: ``qint8`` or ``qint16``.
        percentile: Percent of the values that lie within the range.
        bins: Bins of the first batch.

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
        # Its bounds follow from the histogram and are not saved.
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
        """Count a batch and return it unchanged.

        Raises:
            ValueError: NaN or infinite values.
        """
        self._histogram.collect(x)
        return x

    def set_range(self, amax: Tensor) -> None:
        """Refuse: the range follows from the histogram."""
        raise TypeError("CalibObserver: its range follows from the batches; run them instead")

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return scale and zero point, both ``[1]``; scale 1 before the first batch."""
        amax = self._histogram.compute_amax("percentile", percentile=self.percentile)
        scale = torch.ones(1)
        if amax is not None:
            scale = scale_of(amax.reshape(1), self.quant_min, self.quant_max)
        return scale, torch.zeros_like(scale, dtype=torch.long)

    def extra_repr(self) -> str:
        return (
            f"CalibObserver() calib_bin_edges={self.calib_bin_edges} calib_hist={self.calib_hist}"
        )
