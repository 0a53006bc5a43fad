"""How alike two tensors are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Measure:
    """A similarity, and which of its values are worth a look.

    Attributes:
        name: As callers spell it.
        compute: Of two tensors of one shape, as float64, flat.
        higher_is_better: Whether values below the threshold are reported, else those above.
        threshold: The default; None for no report.
    """

    name: str
    compute: Callable[[Tensor, Tensor], Any]
    higher_is_better: bool = True
    threshold: float | None = None

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Compare; NaN where there are no values."""
        if x.numel() == 0:
            return math.nan
        return float(self.compute(x.double().reshape(-1), y.double().reshape(-1)))

    def is_suspicious(self, value: float, threshold: float | None) -> bool:
        """Whether a value lies beyond the threshold, the default one for None."""
        limit = self.threshold if threshold is None else threshold
        if limit is None:
            return False
        if math.isnan(value):
            return True
        return value < limit if self.higher_is_better else value > limit


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    lengths = x.norm() * y.norm()
    return torch.dot(x, y) / lengths if lengths > 0 else torch.zeros(())


def _mse(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean()


def _l1(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).abs().mean()


def _kl(x: Tensor, y: Tensor) -> Tensor:
    p, q = x.log_softmax(0), y.log_softmax(0)
    return (p.exp() * (p - q)).sum().clamp(min=0)


def _sqnr(x: Tensor, y: Tensor) -> Tensor:
    noise = (x - y).square().sum()
    if noise == 0:
        return torch.tensor(math.inf)
    return 10 * torch.log10(x.square().sum() / noise)


_MEASURES = {
    measure.name: measure
    for measure in (
        Measure("Cosine", _cosine, True, 0.99),
        Measure("MSE", _mse, False, 1.0),
        Measure("L1", _l1, False, 1.0),
        Measure("KL", _kl, False, 1.0),
        Measure("SQNR", _sqnr, True, 20.0),
    )
}


def measure_of(similarity_func: str | Callable[..., Any], caller: str) -> Measure:
    r"""Return a measure by its name, or make one of a function.

    Cosine: ⟨x, y⟩/(‖x‖‖y‖), 0 where either is zero. MSE: mean of (x − y)². L1: mean of |x − y|.
    KL: Σ p·ln(p/q) with p and q the softmax of all values of x and y. SQNR:
    10·log₁₀(Σx²/Σ(x − y)²) decibels, infinite where the two are equal. x is of the first model.

    Raises:
        ValueError: An unknown name.
    """
    if callable(similarity_func):
        return Measure(getattr(similarity_func, "__name__", "similarity"), similarity_func)
    if similarity_func not in _MEASURES:
        raise ValueError(
            f"{caller}: similarity_func={similarity_func!r}: expected one of "
            f"{', '.join(_MEASURES)}, or a function of two tensors"
        )
    return _MEASURES[similarity_func]
