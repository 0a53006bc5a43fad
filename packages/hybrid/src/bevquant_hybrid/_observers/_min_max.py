"""Ranges from extremes: running, averaged, and per channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid._observers._range import RangeObserver
from bevquant_hybrid.dtype import qint8

__all__ = [
    "AveragingObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "PerChannelMinMaxObserver",
]


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
