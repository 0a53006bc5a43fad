"""Sums that read layers in eight bits of their own, as engines of integers alone add."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bevquant_int8sim import IntegerModel, simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


class Block(nn.Module):
    """The sum reads the accumulators of the second convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 4, 1)
        self.out = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.second(torch.relu(self.first(x))) + x))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    quantized = quantize_model(Block().eval(), example_inputs=frame(0)).model.eval()
    calibrate(quantized, [frame(0)], method="max")
    return quantized


def frame(seed: int) -> Tensor:
    return torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(seed))


def recorded(integer: IntegerModel, x: Tensor) -> dict[str, Tensor]:
    return {r.op + r.path: r.value for r in integer.run(x)[1].values()}


def test_the_sum_is_rounded_twice_as_its_formula_says(model: nn.Module) -> None:
    x = frame(0)
    exact, integer = simulate(model, x), simulate(model, x, integer_sums=True)
    (amax,) = integer.sum_ranges.values()
    before = next(s for s in exact.steps if s.op == "add")
    after = next(s for s in integer.steps if s.op == "add")
    values = {name: r for name, r in exact.run(x)[1].items()}
    sums = next(r for r in values.values() if r.path == "second")
    assert sums.value.dtype == torch.int32
    unit = before.scales[0].view(1, -1, 1, 1)
    real = sums.value.double() * unit
    assert amax == pytest.approx(float(real.abs().max()))
    q = (real / (amax / 127)).round().clamp(-128, 127)
    made = next(r for r in integer.run(x)[1].values() if r.path == "second")
    assert made.value.dtype == torch.int8
    assert torch.equal(made.value.double(), q)
    other = next(r for r in values.values() if r.op == "quantize")
    terms = q * (amax / 127) + other.value.double() * float(after.scales[1])
    want = (terms / after.form.scale).round().clamp(0, 127)
    got = next(r for r in integer.run(x)[1].values() if r.op == "add")
    assert int((got.value.double() - want).abs().max()) == 0


def test_ranges_of_another_call_give_the_same_integers_on_other_inputs(model: nn.Module) -> None:
    given = simulate(model, frame(0), integer_sums=True).sum_ranges
    again = simulate(model, frame(1), integer_sums=given)
    assert again.sum_ranges == given
    x = frame(2)
    assert torch.equal(again(x), simulate(model, frame(0), integer_sums=True)(x))


def test_without_it_nothing_changes(model: nn.Module) -> None:
    integer = simulate(model, frame(0))
    assert integer.sum_ranges == {}
    assert any(v.form == "int32" for v in integer.program.values.values())


def test_a_saved_model_keeps_its_sums(model: nn.Module, tmp_path: Path) -> None:
    integer = simulate(model, frame(0), integer_sums=True)
    integer.save(tmp_path / "net")
    assert torch.equal(IntegerModel.load(tmp_path / "net")(frame(1)), integer(frame(1)))


@pytest.mark.parametrize("amax", [0.0, -1.0, float("inf"), float("nan")])
def test_ranges_are_checked(model: nn.Module, amax: float) -> None:
    with pytest.raises(ValueError, match="integer_sums: the range of 'second' is"):
        simulate(model, frame(0), integer_sums={"second": amax})


def test_a_range_of_nothing_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="'first', which no sum of this model reads"):
        simulate(model, frame(0), integer_sums={"first": 1.0})
