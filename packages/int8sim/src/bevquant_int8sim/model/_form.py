"""How a tensor is held between two steps: as integers of one scale, as accumulators, as floats."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_DTYPES = {8: torch.int8, 16: torch.int16}


@dataclass(frozen=True)
class Integers:
    """Integers q that stand for q · scale, between `low` and `high`.

    A tensor with a zero point z holds q − z: of uint8 with z = 3 the integers −3 to 252. The value
    0 is then the integer 0 in every tensor, for padding, sums and clamps too.

    Attributes:
        scale: Value of one step.
        bits: Bits of the integer, 2 to 16, sign included.
        low: Smallest integer: −128, or −127 where the quantizer's range is narrow; with a zero
            point q_min − z.
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
    def full(self) -> bool:
        """Whether they are all integers of `bits` bits, but for the most negative one."""
        return self.high == 2 ** (self.bits - 1) - 1 and self.low in (-self.high, -self.high - 1)

    @property
    def unsigned(self) -> bool:
        """Whether they are 0…255."""
        return (self.low, self.high) == (0, 255)

    def __str__(self) -> str:
        """Their kind: ``"int8"``, ``"uint8"``; ``"affine8"`` for 256 integers with a zero point."""
        if self.unsigned:
            return "uint8"
        spread = (self.high - self.low).bit_length()
        return f"int{self.bits}" if self.full else f"affine{spread}"

    @property
    def narrow(self) -> bool:
        """Whether the most negative integer is left out."""
        return self.low == -self.high


@dataclass(frozen=True)
class TensorType:
    """Type and shape of a tensor; all else is decided by its operator."""

    dtype: torch.dtype
    # Its shape; None if it depends on data, as for ``nonzero``.
    shape: tuple[int, ...] | None

    def __str__(self) -> str:
        sizes = "…" if self.shape is None else ", ".join(map(str, self.shape))
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}]"


FLOAT = "float"
ACCUMULATORS = "int32"
Form = Integers | TensorType | str


def dtype_of(form: Form) -> torch.dtype:
    """Type of the tensors that hold integers, accumulators or floats."""
    if isinstance(form, Integers | TensorType):
        return form.dtype
    return torch.int32 if form == ACCUMULATORS else torch.float32


@dataclass(frozen=True)
class RequiredType:
    """Form in which a reader needs a tensor, and whether after a ReLU."""

    form: Form
    # Clamped at 0 from below.
    relu: bool = False
    # And at this value from above (ReLU6).
    ceiling: float | None = None

    @property
    def plain(self) -> bool:
        """Whether the tensor itself is needed, without a ReLU."""
        return not self.relu

    def behind_relu(self, ceiling: float | None) -> RequiredType:
        """Form that a ReLU's reader needs of the ReLU's input."""
        known = [c for c in (ceiling, self.ceiling) if c is not None]
        return RequiredType(self.form, True, min(known) if known else None)

    def top(self) -> float | None:
        """The ceiling in units of the form."""
        if self.ceiling is None or not isinstance(self.form, Integers):
            return self.ceiling
        return min(self.form.high, round(self.ceiling / self.form.scale))
