"""Additions that no quantizer may touch."""

from __future__ import annotations

from torch import Tensor

__all__ = ["add_in_float"]


def add_in_float(a: Tensor, b: Tensor) -> Tensor:
    """Return `a + b`.

    Modules that call it say `fx.wrap("add_in_float")`, so that tracers do not look inside: behind
    a convolution `a + b` looks like the end of a residual block, whose operands are rounded to 8
    bits. Here attention in float reads the sum, or it holds centres in cells, and 180 cells in 127
    steps would be 0.85 m each.
    """
    return a + b
