"""Models with zero points: integers q − z in every step, saved and compared."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_int8sim import IntegerModel, compare, simulate
from bevquant_int8sim.program import Conv
from bevquant_qnn import QuantConv2d
from bevquant_quantizers import AffineQuantizer


class Net(nn.Module):
    """Convolutions between quantizers with zero points, a sum with a constant, pools, padding."""

    def __init__(self) -> None:
        super().__init__()
        self.read = AffineQuantizer(0.02, 117, 0, 255)
        self.first, self.second = QuantConv2d(3, 8, 3, padding=1), QuantConv2d(8, 8, 3)
        self.middle, self.out = AffineQuantizer(0.01, 0, 0, 255), AffineQuantizer(0.02, 100, 0, 255)
        self.shift = nn.Parameter(torch.randn(8, 1, 1))
        self.shifted = AffineQuantizer(0.01, 90, 0, 255)
        for layer, quantizer in ((self.first, self.read), (self.second, self.middle)):
            layer._input_quantizer = copy.deepcopy(quantizer)
            step = layer.weight.detach().abs().amax((1, 2, 3), keepdim=True) / 127
            layer._weight_quantizer = AffineQuantizer(step)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.relu(self.first(self.read(x))))
        y = self.out(self.second(F.pad(x, (1, 1, 1, 1))))
        y = self.out(y + self.shifted(self.shift))
        y = F.max_pool2d(torch.cat([y, self.out(x)], 1), 3, 2, 1)
        return self.out(F.avg_pool2d(y, 2))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    net = Net().eval().requires_grad_(False)
    x = torch.randn(2, 3, 16, 16)
    return net, x, simulate(net, x)


@pytest.mark.bits
def test_integers_are_those_of_loops_over_stored_ones(model: Any) -> None:
    net, x, integer = model
    assert not integer.float_fallbacks
    _, made = integer.run(x)
    values = {r.path: r for r in made.values() if r.op == "conv"}
    stored = torch.clamp(torch.round(x / net.read.step) + 117, 0, 255)
    for layer, zero, step, padding in (
        (net.first, 117, net.read.step, 0),
        (net.second, 0, net.middle.step, 1),
    ):
        q = torch.round(layer.weight / layer._weight_quantizer.step).double()
        unit = step.double() * layer._weight_quantizer.step.double().flatten()
        bias = torch.round(layer.bias.double() / unit)
        # Padded with the zero point, less z·Σw: the sum over q − z.
        side = layer.padding[0] + padding
        x_q = F.pad(stored.double(), (side,) * 4, value=float(zero))
        sums = F.conv2d(x_q, q) - zero * q.sum((1, 2, 3)).view(-1, 1, 1) + bias.view(-1, 1, 1)
        to, target = (net.middle, 0) if layer is net.first else (net.out, 100)
        factor = (unit / to.step.double()).view(-1, 1, 1)
        stored = torch.clamp(torch.round(sums * factor) + target, 0, 255)
        path = "first" if layer is net.first else "second"
        assert torch.equal(values[path].value.double() + target, stored)
        assert stored.unique().numel() > 60


def test_constants_are_added_as_integers_and_all_is_compared(model: Any) -> None:
    net, x, integer = model
    assert [s.op for s in integer.steps].count("add") == 1
    table = compare(copy.deepcopy(net), integer, [x])
    assert not table.wrong
    assert {row.form for row in table.rows} == {"affine8", "uint8"}
    assert max(row.peak_bits or 0 for row in table.rows) > 12  # of sums, not of what is stored
    assert "affine8 × 0.02" in str(integer)


class Resized(nn.Module):
    """A map made larger, read by two quantizers, one behind a ReLU with the wider range."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.read, self.low, self.high = (AffineQuantizer(step) for step in (0.04, 0.01, 0.03))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.interpolate(self.read(x), size=(13, 11), mode=self.mode)
        return self.low(y), self.high(torch.relu(y))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_a_resized_map_read_in_two_ranges_is_verified(mode: str) -> None:
    """Interpolated values are rounded once, to the reader's steps."""
    x = torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(0)) * 3
    net = Resized(mode).eval()
    model = simulate(net, x)
    for got, wanted in zip(model(x), net(x), strict=True):
        assert torch.equal(got, wanted)
    assert not compare(net, model, [x]).wrong


@pytest.mark.bits
def test_saved_and_loaded(model: Any, tmp_path: Path) -> None:
    _, x, integer = model
    integer.save(tmp_path / "model")
    assert torch.equal(IntegerModel.load(tmp_path / "model")(x), integer(x))


@pytest.mark.parametrize("value", [300, None])
def test_bounds_beside_the_values_own_are_refused(model: Any, value: Any) -> None:
    conv = next(step for step in model[2].program.steps if isinstance(step, Conv))
    with pytest.raises(ValueError, match=r"conv stores .*Integers\(scale"):
        replace(conv, ceiling=value).check()
