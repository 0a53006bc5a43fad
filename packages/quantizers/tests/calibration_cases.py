"""A model and batches for the calibration tests, importable by the processes they start."""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

from bevquant_quantizers import (
    CalibrationReport,
    QuantDescriptor,
    TensorQuantizer,
    named_quantizers,
)


class Block(nn.Module):
    """Inputs, weights per channel, a quantizer shared by two readers, one that is never reached.

    Sums over a fixed order, so that every process computes the same bits.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4, 3, generator=generator))
        self.dropout = nn.Dropout(0.5)
        self.input = TensorQuantizer(QuantDescriptor(calib_method="histogram"))
        self.weights = TensorQuantizer(QuantDescriptor(axis=0))
        self.residual = TensorQuantizer(QuantDescriptor(calib_method="histogram"))
        self.add = self.residual
        self.relu = TensorQuantizer(QuantDescriptor(calib_method="histogram", unsigned=True))
        self.late = TensorQuantizer(QuantDescriptor(calib_method="histogram"))
        self.channels = TensorQuantizer(QuantDescriptor(calib_method="histogram", axis=1))
        self.unreached = TensorQuantizer(QuantDescriptor(calib_method="histogram"))
        self.off = TensorQuantizer(QuantDescriptor(calib_method="histogram"), disabled=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.input(x)
        w = self.weights(self.weight)
        y = sum(x[:, i : i + 1] * w[:, i] for i in range(3))
        y = self.channels(self.dropout(self.residual(y)))
        y = self.add(y + 1) + self.add(y)
        y = self.relu((y - 20).relu())
        return self.off(self.late((y - 15).relu()))


def make_batches(n: int = 7) -> list[Tensor]:
    """Batches of other lengths and growing values; the second is zero, the fourth is empty.

    The first ones leave the last activations at zero, so that later batches set those histograms'
    widths: the fifth (index 4) that of `relu`, the sixth that of `late`.
    """
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(50 + 13 * i, 3, generator=generator) * (1 + 0.5 * i) for i in range(n)]
    if n > 1:
        batches[1] = batches[1] * 0
    if n > 3:
        batches[3] = batches[3][:0]
    return batches


def outcome(model: nn.Module, report: CalibrationReport) -> str:
    """Ranges and report, every bit of them."""
    amaxs = {
        entry.name: None if entry.quantizer.amax is None else entry.quantizer.amax.tolist()
        for entry in named_quantizers(model)
    }
    return json.dumps([amaxs, report.to_json()])
