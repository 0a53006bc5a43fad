"""Common parts of all calibrators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from bevquant_quantizers._descriptor import Axis, kept_axes
from bevquant_quantizers._format import NumBits, check_bits


class Calibrator(ABC):
    """Watches tensors and derives a range from them.

    Args:
        num_bits: Bits of the integer, or of FP8.
        axis: Axes with a range of their own; None is one range.
        unsigned: Whether the integers start at 0.
    """

    name: str | None = None
    """The quantizer this calibrator belongs to, for messages."""

    is_read_by_forwards = False
    """What was counted changes no forward: whoever tells models apart by theirs passes it over."""

    def __init__(self, num_bits: NumBits, axis: Axis, unsigned: bool) -> None:
        self._num_bits = check_bits(num_bits)
        self._axis: Axis = axis
        self._unsigned = unsigned

    @property
    def axis(self) -> Axis:
        """Axes with a range of their own."""
        return self._axis

    @abstractmethod
    def collect(self, x: Tensor) -> None:
        """Watch one tensor."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything watched."""

    @abstractmethod
    def compute_amax(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the range, None where nothing was watched."""

    def __repr__(self) -> str:
        return f"num_bits={self._num_bits} axis={self._axis} unsigned={self._unsigned}"

    def _who(self) -> str:
        return self.name or type(self).__name__

    def _kept_axes(self, x: Tensor) -> list[int]:
        """Axes of `x` that keep their own range, counted from the front."""
        if not isinstance(x, Tensor) or x.is_complex():
            came = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{self._who()}: expected a tensor of real numbers, got {came}")
        if x.is_meta:
            raise ValueError(
                f"{self._who()}: a tensor on the meta device has no values to calibrate with: load "
                "the weights (to_empty, load_state_dict), and give batches on the same device"
            )
        return kept_axes(self._axis, x.shape, self._who())

    def _refuse_non_finite(self, x: Tensor, largest: Tensor) -> None:
        """Raise where the largest absolute value says that `x` holds NaN or infinity."""
        if bool(torch.isfinite(largest).all()):
            return
        nans, infs = int(x.isnan().sum()), int(x.isinf().sum())
        raise ValueError(
            f"{self._who()}: a tensor of shape {tuple(x.shape)} with {nans} NaN and {infs} "
            "infinite values cannot be calibrated: find where they arise, or leave this batch out"
        )
