"""Random models between QuantStub and DeQuantStub, of operators for BPU and CPU."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid.quantization import DeQuantStub, QuantStub
from random_models.dense import CANDIDATES
from random_models.network import Candidate, Network, grow, leave_out, settle


class HybridNetwork(Network):
    """Between stubs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.quant, self.dequant = QuantStub(), DeQuantStub()

    def begin(self, x: Any) -> Any:
        return self.quant(x)

    def finish(self, value: Any) -> Any:
        return self.dequant(value)


def _parameter(rng: random.Random, x: Tensor) -> Any:
    """Arithmetic on a parameter that requires a gradient."""
    if x.dim() != 4:
        return None
    held = nn.Module()
    held.scale = nn.Parameter(torch.rand(1, x.shape[1], 1, 1) + 0.5)
    return held, rng.choice([
        lambda m, v: v * m.scale, lambda m, v: v + m.scale, lambda m, v: v * (m.scale * 2 - 0.5),
        lambda m, v: torch.where(v > 0, v, v * m.scale),
    ])  # fmt: skip


def _tuple(rng: random.Random, x: Tensor) -> Any:
    if x.dim() < 2 or x.shape[1] < 2:
        return None
    return None, rng.choice([
        lambda v: torch.cat(v.tensor_split(2, 1)[::-1], 1), lambda v: v.topk(2, 1)[0],
        lambda v: v.max(1, keepdim=True).values, lambda v: v.sort(1)[0],
        lambda v: v - v.min(1, keepdim=True)[0],
    ])  # fmt: skip


EXTRA = (Candidate("parameter", _parameter), Candidate("tuple", _tuple))


def make(seed: int, skipped: Collection[int] = ()) -> tuple[Network, list[tuple[Tensor, ...]]]:
    """A model, and batches for it: two of one size, then another batch."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    batches = [(torch.randn(n, 6, 8, 8, generator=generator),) for n in (2, 2, 3)]
    length = rng.randint(2, 7)
    steps, parts, returned = grow(rng, (*CANDIDATES, *EXTRA), batches[0][0], length)
    return settle(HybridNetwork(leave_out(steps, skipped), parts, returned), generator), batches
