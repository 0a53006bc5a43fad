"""Random networks of what may stand in a file."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_hybrid.quantization import DeQuantStub, QuantStub

Fixture = Callable[..., Any]
PROFILES = ("tensorrt", "onnxruntime", "horizon")


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Random(nn.Module):
    """Operators one behind the other, sums and concatenations of what came before."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        choice = random.Random(seed)
        parts: list[nn.Module] = []
        self.plan: list[tuple[str, int, int]] = []
        for step in range(14):
            kind = choice.choice(["layer", "layer", "function", "keep", "add", "cat", "mul"])
            parts.append(self._part(kind, choice))
            self.plan.append((kind, choice.randint(0, step), choice.randint(0, step)))
        self.parts = nn.ModuleList(parts)
        self.returned = [choice.randint(1, len(parts)) for _ in range(2)]

    def _part(self, kind: str, choice: random.Random) -> nn.Module:
        if kind == "layer":
            make = choice.choice([
                lambda: nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
                lambda: nn.Conv2d(6, 6, 1, bias=False),
                lambda: nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, groups=3), nn.ReLU6()),
                lambda: nn.Sequential(nn.ConvTranspose2d(6, 6, 2, 2), nn.MaxPool2d(2)),
                lambda: nn.BatchNorm2d(6),
            ])  # fmt: skip
            return make()
        if kind == "cat":
            return nn.Conv2d(12, 6, 1)
        if kind == "function":
            return choice.choice([nn.SiLU, nn.Tanh, nn.GELU, nn.LeakyReLU, nn.ELU, nn.PReLU])()
        if kind == "keep":
            return choice.choice([
                nn.ReLU(), nn.MaxPool2d(3, 1, 1), nn.ChannelShuffle(2), nn.AvgPool2d(3, 1, 1),
                Of(lambda x: x.transpose(-1, -2)), Of(lambda x: F.pad(x[..., 2:], (1, 1))),
                Of(lambda x: torch.clamp(x, -0.5, 0.7)), nn.Upsample(size=(8, 8)),
            ])  # fmt: skip
        return nn.Identity()

    def forward(self, x: Tensor) -> Any:
        made = [self.quant(x)]
        for part, (kind, first, second) in zip(self.parts, self.plan, strict=True):
            a, b = made[first], made[second]
            if kind == "add":
                made.append(torch.relu(a + b) if first % 2 else a + b)
            elif kind == "mul":
                made.append(a * b)
            else:
                made.append(part(torch.cat([a, b], 1) if kind == "cat" else a))
        return [self.dequant(made[i]) for i in (*self.returned, -1)]


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_networks_make_the_models_integers(
    seed: int, hybrid: bool, prepared: Fixture, found: Fixture
) -> None:
    x = torch.randn(2, 6, 8, 8)
    net = Random(seed).eval()
    some = [f"parts.{i}" for i in range(seed % 3, len(net.parts), 4)]
    settings = {"hybrid": True, "hybrid_dict": {"module_name": some}} if hybrid else {}
    qat = prepared(net, x, **settings)
    for profile in PROFILES:
        _, counted, lint = found(qat, x, profile)
        assert lint <= ({"TRT012", "TRT014"} if profile == "tensorrt" else set())
        for op, (different, elements, largest) in counted.items():
            assert largest <= 1, (profile, op)
            # Two integer values, a tie of which may fall the other way, are no rare thing.
            assert different <= 0.03 * elements, (profile, op)
