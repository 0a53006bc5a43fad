"""Two runs of the same values: sums for SQNR and cosine, and the largest difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Values that are converted to float64 at a time: they stay in the cache.
PIECE = 1 << 16
_SMALL = 1 << 18  # values for which the kernels are not loaded


def kernels_for(*tensors: Tensor) -> Any:
    """The compiled kernels; None without numba, for few values, and for other than float32."""
    small = tensors[0].numel() < _SMALL
    if small or any(t.dtype != torch.float32 or t.device.type != "cpu" for t in tensors):
        return None
    try:
        from bevquant_qnn import _pair_sums_numba
    except ImportError:
        return None
    return _pair_sums_numba


def flat(*tensors: Tensor) -> list[Any]:
    """Values of tensors of one shape as flat arrays, in the order of memory where that is one."""
    one = len({tensor.stride() for tensor in tensors}) == 1
    if one and torch.ops.aten.is_non_overlapping_and_dense(tensors[0]):
        return [t.detach().as_strided((t.numel(),), (1,)).numpy() for t in tensors]
    return [tensor.detach().reshape(-1).numpy() for tensor in tensors]


def count_beyond(values: Tensor, amax: float) -> int:
    """How many values are larger than `amax` in magnitude; NaN is not."""
    kernels = kernels_for(values)
    if kernels is not None:
        return int(kernels.count_beyond(*flat(values), amax))
    return int(torch.count_nonzero(values.abs() > amax))


@dataclass
class PairSums:
    """Σ float², Σ quantized², Σ float · quantized and Σ (quantized − float)², in float64.

    The sums are over values that are finite in both runs. `not_finite` counts values that are
    finite in float alone.

    Example:
        >>> import torch
        >>> sums = PairSums()
        >>> sums.add(torch.tensor([3.0, 4.0]), torch.tensor([3.3, 4.4]))
        >>> round(sums.sqnr_db, 3), round(sums.cosine, 6)
        (20.0, 1.0)
    """

    signal: float = 0.0
    energy: float = 0.0
    dot: float = 0.0
    noise: float = 0.0
    not_finite: float = 0.0

    def add(self, wanted: Tensor, got: Tensor) -> None:
        """Add one pair of equal shape."""
        sums = _sums_of(wanted, got)
        if not all(map(math.isfinite, sums)):
            # One of these values makes all sums useless.
            known = wanted.isfinite()
            both = known & got.isfinite()
            self.not_finite += int(known.sum()) - int(both.sum())
            sums = _sums_of(wanted[both], got[both])
        self._add(sums, strict=False)

    def add_sums(self, sums: Sequence[float]) -> None:
        """Add the result of another object's `as_sums`."""
        self._add(sums, strict=True)

    def _add(self, sums: Sequence[float], *, strict: bool) -> None:
        for name, value in zip(vars(self), sums, strict=strict):
            setattr(self, name, getattr(self, name) + float(value))

    def as_sums(self) -> tuple[float, ...]:
        """The four sums, and the number of values that are finite in float alone."""
        return astuple(self)

    @property
    def sqnr_db(self) -> float | None:
        """10·log10(Σ float² / Σ (quantized − float)²); None where one is 0 or not finite.

        Minus infinity where a value is finite in float alone.
        """
        if self.not_finite:
            return -math.inf
        if not (0 < self.signal < math.inf and 0 < self.noise < math.inf):
            return None
        return 10 * math.log10(self.signal / self.noise)

    @property
    def cosine(self) -> float | None:
        """Σ float · quantized / √(Σ float² · Σ quantized²); None where one is 0 or not finite."""
        # Two roots, as the product of the sums may overflow.
        length = math.sqrt(self.signal) * math.sqrt(self.energy)
        return self.dot / length if 0 < length < math.inf and not self.not_finite else None


def _sums_of(wanted: Tensor, got: Tensor) -> list[float]:
    """The four sums of a pair."""
    kernels = kernels_for(wanted, got)
    if kernels is not None:
        return [float(value) for value in kernels.pair_lines(*flat(wanted, got)).sum(0)]
    sums = [0.0] * 4
    first, second = wanted.reshape(-1), got.reshape(-1)
    for start in range(0, first.numel(), PIECE):
        f, q = (values[start : start + PIECE].double() for values in (first, second))
        apart = q - f
        for place, (x, y) in enumerate(((f, f), (q, q), (f, q), (apart, apart))):
            sums[place] += float(torch.dot(x, y))
    return sums


class Gap(NamedTuple):
    """Differences of two tensors, see `gap`.

    Attributes:
        different: Number of differing values.
        largest: Largest difference.
        size: Largest finite magnitude of the expected tensor; 0 where there is none.
    """

    different: int
    largest: float
    size: float


def gap(wanted: Tensor, made: Tensor, slack: float = 0.0) -> Gap:
    """Compare two tensors of one shape, value by value, in float64.

    Two NaN, and two equal infinities, are no difference. A NaN beside a number is an infinite one.

    Args:
        wanted: The expected values.
        made: The other run's.
        slack: Difference that is not counted, as a share of the size.

    Example:
        >>> gap(torch.tensor([1.0, torch.nan, 4.0]), torch.tensor([1.5, torch.nan, 4.0]))
        Gap(different=1, largest=0.5, size=4.0)
    """
    finite = wanted[wanted.isfinite()] if wanted.is_floating_point() else wanted
    size = max(abs(float(v)) for v in torch.aminmax(finite)) if finite.numel() else 0.0
    if made.dtype == wanted.dtype and torch.equal(made, wanted):  # the usual case
        return Gap(0, 0.0, size)
    mine, other = made.double(), wanted.double()
    same = (mine == other) | (mine.isnan() & other.isnan())
    apart = (mine - other).abs().nan_to_num(torch.inf, torch.inf).masked_fill(same, 0.0)
    largest = float(apart.max()) if apart.numel() else 0.0
    return Gap(int((apart > slack * size).count_nonzero()), largest, size)
