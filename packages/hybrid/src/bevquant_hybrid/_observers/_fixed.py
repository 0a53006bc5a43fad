"""Ranges that no data changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid._observers._range import RangeObserver
from bevquant_hybrid.dtype import qint8

__all__ = ["ClipObserver", "FixedScaleObserver", "NoopObserver"]


class FixedScaleObserver(RangeObserver):
    """A scale given once, such as 1/128 for pictures in [−1, 1).

    Args:
        scale: Value of one integer step, positive.
        zero_point: 0, the only one there is.
        averaging_constant: Accepted, as of the observer that this one replaces.
        **kwargs: As in `RangeObserver`.

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
        """Keep the fixed scale; its range is what `scale` says."""
        super().set_range(self.fixed_scale * (self.quant_max - self.quant_min) / 2)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the scale as it was given, and 0."""
        scale = self.fixed_scale.to(self.min_val.device)
        return scale, torch.zeros_like(scale, dtype=torch.long)


class ClipObserver(RangeObserver):
    """Extremes of everything seen, cut to [xmin, xmax].

    Args:
        xmin: Smallest bound.
        xmax: Largest bound.
        averaging_constant: Accepted, as of the observer that this one replaces.
        **kwargs: As in `RangeObserver`.

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
        """Extremes, cut."""
        low, high = super().measure(x)
        if not bool((low.isfinite() & high.isfinite()).all()):
            return low, high
        return low.clamp(self.xmin, self.xmax), high.clamp(self.xmin, self.xmax)


class NoopObserver(torch.nn.Module):
    """Observes nothing: weights need no calibration, their range is known.

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
