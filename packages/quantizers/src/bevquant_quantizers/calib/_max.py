"""The range as the largest absolute value seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevquant_quantizers._descriptor import Axis
from bevquant_quantizers._format import NumBits

from ._calibrator import Calibrator


class _ShapeChangedError(RuntimeError, ValueError):
    """A RuntimeError as in pytorch-quantization, and a ValueError as in HistogramCalibrator."""


class MaxCalibrator(Calibrator):
    """Keeps the largest absolute value, per tensor or per channel.

    Args:
        num_bits: Bits of the integer, or of FP8.
        axis: Axes with a range of their own; None is one range.
        unsigned: Whether the integers start at 0.
        track_amax: Keep the range of every tensor watched, in `amaxs`.

    Examples:
        >>> import torch
        >>> calibrator = MaxCalibrator(8, None, False)
        >>> calibrator.collect(torch.tensor([1.0, -3.0]))
        >>> calibrator.compute_amax()
        tensor(3.)
    """

    def __init__(
        self, num_bits: NumBits, axis: Axis, unsigned: bool, track_amax: bool = False
    ) -> None:
        super().__init__(num_bits, axis, unsigned)
        self._track_amax = track_amax
        self._amaxs: list[np.ndarray[Any, Any]] = []
        self._calib_amax: Tensor | None = None

    @property
    def amaxs(self) -> list[np.ndarray[Any, Any]]:
        """The range of each tensor watched, as arrays, where `track_amax` asked for them."""
        return self._amaxs

    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Take a tensor's largest absolute values into account. An empty tensor changes nothing.

        Raises:
            ValueError: NaN or infinite values.
            RuntimeError: The number of channels differs from the tensors before.
        """
        kept = self._kept_axes(x)
        if x.numel() == 0:
            return
        reduced = [i for i in range(x.dim()) if i not in kept]
        # The larger of max and −min is one pass each and no copy; abs() would make one.
        local = torch.maximum(x.amax(reduced, keepdim=True), -x.amin(reduced, keepdim=True))
        local = local.abs() if reduced else x.abs()
        self._refuse_non_finite(x, local)
        if local.numel() == 1:
            local = local.reshape(())
        if self._calib_amax is None:
            self._calib_amax = local.clone()
        elif local.shape != self._calib_amax.shape:
            raise _ShapeChangedError(
                f"{self._who()}: amax shape changed! It was {tuple(self._calib_amax.shape)}, this "
                f"tensor of shape {tuple(x.shape)} gives {tuple(local.shape)}"
            )
        else:
            self._calib_amax = torch.maximum(self._calib_amax, local.to(self._calib_amax))
        if self._track_amax:
            self._amaxs.append(local.float().cpu().numpy())

    def reset(self) -> None:
        """Forget every tensor watched."""
        self._calib_amax = None
        self._amaxs = []

    def compute_amax(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the largest absolute values, None where nothing was watched.

        Arguments are accepted and left unused, so that one call can serve every calibrator.
        """
        return None if self._calib_amax is None else self._calib_amax.clone()

    def __str__(self) -> str:
        return f"MaxCalibrator(track_amax={self._track_amax})"

    def __repr__(self) -> str:
        tail = f" amaxs={self._amaxs}" if self._track_amax else ""
        return (
            f"MaxCalibrator({super().__repr__()} calib_amax={self._calib_amax} "
            f"track_amax={self._track_amax}{tail})"
        )
