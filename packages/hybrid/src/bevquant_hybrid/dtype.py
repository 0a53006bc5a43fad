"""Integer types of quantized tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["QuantDType", "as_quant_dtype", "qinfo", "qint4", "qint8", "qint16", "qint32"]


class QuantDType(str):
    """The type of a quantized tensor: a string that prints and compares as its name.

    Example:
        >>> print(qint8, qint8 == "qint8", qint8.bits)
        qint8 True 8
    """

    __slots__ = ()

    @property
    def bits(self) -> int:
        """Width in bits."""
        return int(self.removeprefix("qint"))

    @property
    def storage(self) -> torch.dtype:
        """The torch type that holds the integers."""
        return {4: torch.int8, 8: torch.int8, 16: torch.int16, 32: torch.int32}[self.bits]

    def __repr__(self) -> str:
        return str(self)


qint4 = QuantDType("qint4")  # of weights
qint8 = QuantDType("qint8")
qint16 = QuantDType("qint16")
qint32 = QuantDType("qint32")


_OF_TORCH = {torch.qint8: qint8, torch.qint32: qint32}


def as_quant_dtype(dtype: str | torch.dtype) -> QuantDType:
    """Return the type for a name, a `QuantDType` or torch's type such as ``torch.qint8``.

    Raises:
        ValueError: No quantized type of that name.

    Example:
        >>> as_quant_dtype("qint16") is qint16
        True
    """
    for known in (qint8, qint16, qint32, qint4):
        if dtype == known:
            return known
    if isinstance(dtype, torch.dtype) and dtype in _OF_TORCH:
        return _OF_TORCH[dtype]
    raise ValueError(f"dtype={dtype!r}: expected qint8, qint16 or qint32")


@dataclass(frozen=True, init=False)
class qinfo:
    """Range of a quantized type, like `torch.iinfo`.

    Attributes:
        bits: Width.
        min: Smallest integer.
        max: Largest integer.
        dtype: The type.

    Example:
        >>> qinfo("qint8").min, qinfo(qint16).max
        (-128, 32767)
    """

    bits: int
    min: int
    max: int
    dtype: QuantDType

    def __init__(self, dtype: str) -> None:
        kind = as_quant_dtype(dtype)
        for name, value in (
            ("bits", kind.bits),
            ("min", -(2 ** (kind.bits - 1))),
            ("max", 2 ** (kind.bits - 1) - 1),
            ("dtype", kind),
        ):
            object.__setattr__(self, name, value)
