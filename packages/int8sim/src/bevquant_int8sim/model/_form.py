"""How a tensor is held between two steps: as integers of one scale, as accumulators, as floats."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ACCUMULATORS", "FLOAT", "Demand", "Form", "Integers"]

_DTYPES = {8: torch.int8, 16: torch.int16}


@dataclass(frozen=True)
class Integers:
    """Integers q that stand for q · scale, between `low` and `high`.

    Attributes:
        scale: Value of one step.
        bits: Bits of the integer, 2 to 16.
        low: Smallest integer: −128, or −127 where the quantizer's range is narrow.
        high: Largest integer.
    """

    scale: float
    bits: int
    low: int
    high: int

    @property
    def dtype(self) -> torch.dtype:
        """Type that holds them."""
        return _DTYPES[8 if self.bits <= 8 else 16]

    @property
    def narrow(self) -> bool:
        """Whether the most negative integer is left out."""
        return self.low == -self.high


FLOAT = "float"
ACCUMULATORS = "int32"
Form = Integers | str


@dataclass(frozen=True)
class Demand:
    """What a reader wants of a tensor: a form, and whether behind a ReLU."""

    form: Form
    relu: bool = False
