"""`spconv.core`: the names of its algorithms. Here they choose nothing."""

from __future__ import annotations

from enum import Enum

__name__ = "spconv.core"


class ConvAlgo(Enum):
    """Algorithm of a convolution. Accepted and kept as an attribute; the kernel is the same."""

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


class AlgoHint(Enum):
    """Purpose for which spconv tunes an algorithm."""

    NoHint = 0
    Fowrard = 1  # spelled as in spconv
    BackwardInput = 2
    BackwardWeight = 4
