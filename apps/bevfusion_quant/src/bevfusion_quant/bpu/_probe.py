"""One node of a unit's graph, watched in three models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bevfusion_quant.measure import PairSums
from bevfusion_quant.results import BpuLayer

if TYPE_CHECKING:
    from bevfusion_quant.bpu._labels import Label
    from bevquant_hybrid.qtensor import QTensor

__all__ = ["NodeProbe"]

_HALF_RANGE = 127.5  # steps from 0 to the end of int8's range, as scales are made


@dataclass(eq=False)
class NodeProbe:
    """Sums over one node's results."""

    label: Label
    sources: tuple[str, ...]
    fake: PairSums = field(default_factory=PairSums)
    integer: PairSums = field(default_factory=PairSums)
    shape: tuple[int, ...] = ()
    frames: int = 0
    max_steps: int = 0
    sum_steps: int = 0
    differ: int = 0
    numel: int = 0
    beyond: int = 0
    amax: float | None = None

    @property
    def is_operator(self) -> bool:
        """Whether it computes, instead of quantizing what comes in."""
        return not self.label.operator.endswith("Stub")

    def judge(self, wanted: Tensor, fake: QTensor, got: QTensor) -> None:
        """One frame's results."""
        self.fake.add(wanted, fake.dequantize())
        self.integer.add(wanted, got.dequantize())
        apart = (got.int_repr().int() - fake.int_repr().int()).abs_()
        self.max_steps = max(self.max_steps, int(apart.max()))
        self.sum_steps += int(apart.sum())
        self.differ += int(torch.count_nonzero(apart))
        self.shape, self.frames = tuple(wanted.shape), self.frames + 1
        # How much of the float result the scale that its readers see cannot express.
        self.amax = float(fake.scale) * _HALF_RANGE
        self.numel += wanted.numel()
        low, high = wanted.aminmax()
        if max(-float(low), float(high)) > self.amax:
            self.beyond += int(torch.count_nonzero(wanted.abs() > self.amax))

    def row(self, sources: list[NodeProbe]) -> BpuLayer:
        """What was seen, and of its inputs what they could not express."""
        read = sum(source.numel for source in sources)
        ranges = [source.amax for source in sources if source.amax is not None]
        return BpuLayer(
            self.label.path,
            self.label.operator,
            self.shape[1],
            self.numel / self.shape[1] / self.frames,
            self.fake.sqnr_db,
            self.fake.cosine,
            self.integer.sqnr_db,
            self.integer.cosine,
            self.max_steps,
            self.sum_steps / self.numel,
            self.differ / self.numel,
            sum(source.beyond for source in sources) / read if read else None,
            max(ranges, default=None),
        )
