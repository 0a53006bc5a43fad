"""Elementwise functions of integers: tables."""

from __future__ import annotations

import copy
from typing import Any

import torch

from bevquant_hybrid import _integer_ops as ops
from bevquant_hybrid.nn.quantized._weighted import FixedPoint, integers
from bevquant_hybrid.qtensor import QTensor


class SegmentLUT(FixedPoint):
    """A table of the function at every integer: 256 entries of 8 bits, 65,536 of 16.

    The entry is 0 where the function is undefined (the logarithm of −1), and the largest integer
    where it is infinite.
    """

    def __init__(self, source: Any, rounding: str) -> None:
        super().__init__(source, rounding)
        # In float64, so that a slope or bound is not rounded once more than the table.
        self.function = copy.deepcopy(source.function).double().eval()
        self.jumps = bool(getattr(source.function, "jumps", False))

    def forward(self, x: QTensor) -> QTensor:
        """Look integers up."""
        x = integers(self, x)
        half = 2 ** (x.dtype.bits - 1)
        steps = torch.arange(-half, half, dtype=torch.float64, device=x.device)
        entries = steps * x.scale.double()
        if self.jumps:
            # As in training, bit for bit: beside a jump the last one decides.
            entries = (steps.float() * x.scale).double()
        values = self.function(entries).nan_to_num(0.0, torch.inf, -torch.inf)
        table = self.quantized(values).int_repr()
        return self.output(ops.lookup(x.int_repr(), table, self.qualified_name))
