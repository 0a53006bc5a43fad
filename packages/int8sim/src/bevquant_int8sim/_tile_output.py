"""Results that the kernels store: int32 accumulators, or int8 after requantization."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_NEAR_TIE = 2.0**-13
_LARGE = 2.0**90  # times an accumulator, this stays far below the largest float32


@dataclass(frozen=True, eq=False)
class Residual:
    """A tensor to add after requantization: ``q = clamp(round((q + other)·scale))``.

    Or `at_once`, before anything is rounded: ``q = clamp(round(acc·multiplier + other·scale))``.
    """

    # int8 ``[rows, columns]``, a row for each output row.
    rows: npt.NDArray[Any]
    # The operands' scale over that of the sum; of `other` alone where it is `at_once`.
    scale: float
    # Lower clamp of the sum; 0 for a ReLU behind it.
    low: int
    # Upper clamp of the sum.
    high: int
    # Whether the sum is rounded once.
    at_once: bool = False


@dataclass(frozen=True, eq=False)
class Requantization:
    """``clamp(rint(acc · multiplier))`` in float64, half to even."""

    multiplier: npt.NDArray[np.float64]
    # Lower clamp; 0 for a ReLU.
    low: int
    high: int
    # Added behind it, or ``None``.
    residual: Residual | None = None

    def limits(self) -> npt.NDArray[np.float64]:
        """The numbers of the kernels' parameter LIMITS.

        Clamps; scale and clamps of the sum; a residual's own scale, or 0; how far from an integer a
        value in float32 is certain to be rounded as in float64.
        """
        added, edge = self.residual, self._edge()
        if added is None:
            return np.array([self.low, self.high, 1.0, 0, 0, 0, edge], np.float64)
        if added.at_once:
            return np.array([added.low, added.high, 1.0, 0, 0, added.scale, edge], np.float64)
        sum_limits = (added.scale, added.low, added.high)
        return np.array([self.low, self.high, *sum_limits, 0, edge], np.float64)

    def singles(self) -> npt.NDArray[np.float32]:
        """The multiplier in float32."""
        return np.minimum(self.multiplier, _LARGE).astype(np.float32)

    def _edge(self) -> float:
        """Half a step less what float32 may be off, or −1: never certain."""
        added = self.residual
        scale = 1.0 if added is None else added.scale
        largest = 1.0 if added is not None and added.at_once else _LARGE
        # What lies between the clamps is then a sum of at most two terms below 257 in size, each
        # with three roundings of 2⁻²⁴: less than 7e-5 beside what float64 makes of it.
        if scale <= largest and np.all(self.multiplier <= _LARGE):
            return 0.5 - _NEAR_TIE
        # Numbers beyond float32's range, and small differences of large terms.
        return -1.0

    def part(self, columns: slice, padded: int) -> Requantization:
        """The same for some of the output channels, filled to `padded` columns."""
        factors = np.ones(padded)
        chosen = self.multiplier[columns]
        factors[: len(chosen)] = chosen
        residual = self.residual
        if residual is not None:
            residual = replace(residual, rows=residual.rows[:, columns.start :])
        return Requantization(factors, self.low, self.high, residual)


def full_rows(residual: Tensor, columns: int) -> npt.NDArray[Any]:
    """int8 rows, with zeros behind them up to that many columns."""
    missing = columns - residual.shape[1]
    rows = torch.nn.functional.pad(residual, (0, missing)) if missing else residual
    values: npt.NDArray[Any] = rows.contiguous().numpy()
    return values
