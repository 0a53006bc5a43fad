"""The numbers that a quantized tensor may hold: integers, FP8, and blocks of FP8 or FP4."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NumBits = int | tuple[int, int] | str
"""Bits of an integer, (exponent, mantissa) bits of a float, as ModelOpt writes them, or the name of
a block format: ``"mxfp8"``, ``"mxfp4"``, ``"nvfp4"``."""

_FLOATS = {(4, 3): torch.float8_e4m3fn, (5, 2): torch.float8_e5m2}
# Element, its type, values in a block and type of their scale.
_BLOCKS = {
    "mxfp8": ((4, 3), torch.float8_e4m3fn, 32, "e8m0"),
    "mxfp4": ((2, 1), torch.float4_e2m1fn_x2, 32, "e8m0"),
    "nvfp4": ((2, 1), torch.float4_e2m1fn_x2, 16, "e4m3"),
}
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class Format:
    r"""The numbers of a quantized tensor, in front of its scale amax / `high`.

    Integers lie in steps of 1. FP8 numbers (OCP 8-bit floating point specification 1.0) are

    .. math:: \pm 2^{e} \, (1 + m / 2^{M}), \quad \text{and} \quad
              \pm 2^{e_{\min}} \, m / 2^{M} \text{ below } 2^{e_{\min}}

    with M = 3, e from −6 to 8 in E4M3, M = 2, e from −14 to 15 in E5M2 and M = 1, e from 0 to 2 in
    E2M1 (FP4). Block formats have E4M3 or E2M1 numbers, and scales of `block` values each
    (`quantize_blocks`).

    Attributes:
        name: ``"int8"``, ``"uint8"``, ``"fp8_e4m3"``, ``"mxfp4"`` and the like.
        num_bits: Bits of an integer; (exponent, mantissa) bits of a float; name of a block format.
        low: Smallest number.
        high: Largest number: 127 of int8, 448 of E4M3, 57344 of E5M2.
        dtype: Torch's type of a float; None for integers.
        block: Values that have a scale of their own; 0 without blocks.
        scale: Type of these scales: ``"e8m0"``, powers of two, or ``"e4m3"``.
    """

    name: str
    num_bits: NumBits
    low: float
    high: float
    dtype: torch.dtype | None = None
    block: int = 0
    scale: str = ""

    @property
    def bits(self) -> int:
        """Bits of a stored number, its sign included."""
        if isinstance(self.num_bits, int):
            return self.num_bits
        pair = _BLOCKS[self.num_bits][0] if isinstance(self.num_bits, str) else self.num_bits
        return 1 + sum(pair)

    @property
    def last_step(self) -> float:
        """Distance of the two largest numbers."""
        levels = self.levels[-2:]
        return float(levels[-1] - levels[0])

    @property
    def levels(self) -> npt.NDArray[np.float64]:
        """The numbers from 0 up, ascending."""
        if self.dtype is None:
            return np.arange(self.high + 1)
        if self.bits == 4:
            return _FP4
        codes = torch.arange(128, dtype=torch.uint8).view(self.dtype).double()
        return codes[codes.isfinite()].numpy()

    def rounded(self, x: Tensor) -> Tensor:
        """The nearest numbers, ties to even, and beyond the ends the ends; NaN stays NaN.

        As torch's cast to FP8, and ONNX's with ``saturate=1``. `x` may be overwritten.

        Args:
            x: Values over their scale, float32 or float64.
        """
        if self.dtype is None:
            return torch.clamp(x.round_(), self.low, self.high)
        x = x.clamp(self.low, self.high)
        if self.bits == 4:  # which torch does not cast to
            mantissa, smallest = 0.5, 1.0
        elif x.dtype == torch.float32:
            return x.to(self.dtype).float()
        else:  # torch casts float64 by way of float32, which would round twice
            mantissa, smallest = torch.finfo(self.dtype).eps, torch.finfo(self.dtype).tiny
        exponent = torch.frexp(x.abs().clamp(min=smallest))[1] - 1
        step = torch.ldexp(torch.full_like(x, mantissa), exponent)
        return (x / step).round_() * step


@cache
def format_of(num_bits: NumBits, unsigned: bool = False, narrow_range: bool = True) -> Format:
    """The format of a quantizer.

    Args:
        num_bits: 0 to 32, (4, 3) for FP8 E4M3, (5, 2) for FP8 E5M2, or ``"mxfp8"``, ``"mxfp4"``,
            ``"nvfp4"``.
        unsigned: Integers from 0.
        narrow_range: Integers without the most negative one.

    Raises:
        TypeError: `num_bits` is of another type.
        ValueError: `num_bits` is none of these, 1 with a sign, or a float is unsigned.

    Examples:
        >>> format_of(8).low, format_of(8, narrow_range=False).low, format_of(4, unsigned=True).high
        (-127.0, -128.0, 15.0)
        >>> format_of((4, 3)).name, format_of((4, 3)).high
        ('fp8_e4m3', 448.0)
    """
    num_bits = check_bits(num_bits)
    if not isinstance(num_bits, int) and unsigned:
        raise ValueError(f"num_bits={num_bits} has a sign: leave unsigned=True out")
    if isinstance(num_bits, str):
        _, dtype, block, scale = _BLOCKS[num_bits]
        high = 6.0 if dtype == torch.float4_e2m1fn_x2 else torch.finfo(dtype).max
        return Format(num_bits, num_bits, -high, high, dtype, block, scale)
    if isinstance(num_bits, tuple):
        exponent, mantissa = num_bits
        dtype = _FLOATS[num_bits]
        high = torch.finfo(dtype).max
        return Format(f"fp8_e{exponent}m{mantissa}", num_bits, -high, high, dtype)
    if num_bits == 1 and not unsigned:
        raise ValueError(
            "num_bits=1 with a sign has no positive integer; expected 2 or more, or unsigned=True"
        )
    top = 2.0 ** (num_bits - 1 + bool(unsigned)) - 1.0
    low = 0.0 if unsigned else -top if narrow_range else -top - 1.0
    return Format(f"{'u' * bool(unsigned)}int{num_bits}", num_bits, low, top)


def check_bits(num_bits: object) -> NumBits:
    """`num_bits` as it is; a list of two, as YAML and JSON have it, as a tuple."""
    if isinstance(num_bits, str):
        if num_bits in _BLOCKS:
            return num_bits
        raise TypeError(
            f"num_bits must be an integer, a pair or one of {list(_BLOCKS)}, not {num_bits!r}"
        )
    if isinstance(num_bits, list | tuple):
        pair = tuple(num_bits)
        if pair in _FLOATS:
            return pair
        raise ValueError(
            f"num_bits must be a whole number of integer bits, {' or '.join(map(str, _FLOATS))} "
            f"(exponent and mantissa bits of FP8), not {num_bits}"
        )
    if not isinstance(num_bits, int):
        raise TypeError(f"num_bits must be an integer, not {type(num_bits)}.")
    if not 0 <= num_bits <= 32:
        raise ValueError(f"num_bits must be >= 0 and at most 32, not {num_bits}.")
    return num_bits
