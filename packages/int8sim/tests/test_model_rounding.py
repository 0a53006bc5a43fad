"""Whole models that round half up, away from zero, or in fixed point: step by step, exactly."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional

from bevquant_int8sim import IntegerModel, compare, fixed_point_multiplier, simulate
from bevquant_int8sim.program import Add, Conv, Quantize, Rounds
from bevquant_qnn import quantize_model
from bevquant_quantizers import TensorQuantizer, calibrate

X = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8).sin()


class Net(nn.Module):
    """A residual block, an average, a map made larger, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.pool, self.last = nn.AvgPool2d(2), nn.Conv2d(8, 8, 1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x).relu()
        x = x + self.conv(x)
        x = functional.interpolate(self.pool(x), scale_factor=2.0, mode="bilinear")
        return self.fc(self.last(x).mean((2, 3)))


def calibrated():
    """Scales that are powers of two, of which many products lie halfway between integers."""
    torch.manual_seed(0)
    net = quantize_model(Net().eval(), example_inputs=X).model
    calibrate(net, [X], method="max")
    for quantizer in net.modules():
        if isinstance(quantizer, TensorQuantizer) and quantizer.amax is not None:
            quantizer.amax = 127 * 2.0 ** (quantizer.amax / 127).log2().ceil()
        elif isinstance(quantizer, nn.Conv2d | nn.Linear):
            shape = [len(quantizer.weight)] + [1] * (quantizer.weight.dim() - 1)
            quantizer._weight_quantizer.amax = torch.full(shape, 127 * 2.0**-3)
    return net


def rounded(value: Fraction, rounding: str) -> int:
    """By the definition, in rational numbers."""
    floor = math.floor(value)
    rest = value - floor
    up = {"half_even": floor % 2 == 1, "half_up": True, "half_away": value > 0}[rounding]
    return floor + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and up))


def multiplied(multiplier, arithmetic):
    """What a step multiplies by, as rational numbers."""
    values = [Fraction(float(v)) for v in multiplier.reshape(-1)]
    if arithmetic == "float64":
        return values
    mantissas, shifts = (v.reshape(-1).tolist() for v in fixed_point_multiplier(multiplier))
    return [Fraction(m, 2**s) for m, s in zip(mantissas, shifts, strict=True)]


@pytest.mark.parametrize("arithmetic", ["float64", "fixed_point"])
@pytest.mark.parametrize("rounding", ["half_even", "half_up", "half_away"])
def test_every_step_rounds_as_the_model_was_told(rounding, arithmetic):
    model = simulate(calibrated(), X, rounding=rounding, arithmetic=arithmetic)
    checked, ties = set(), 0

    def see(step, given, made):
        nonlocal ties
        if isinstance(step, Conv) and made[0].dtype == torch.int8:
            weight, bias = step.weight.double(), step.bias.double()
            padding = [before for before, _ in step.padding]
            acc = functional.conv2d(given[0].double(), weight, bias, padding=padding)
            acc = acc.movedim(1, -1)
            factors = multiplied(step.multiplier, arithmetic)
            factors = factors * (acc.shape[-1] // len(factors))
            exact = [int(a) * factors[i % len(factors)] for i, a in enumerate(acc.flatten())]
            got = made[0].movedim(1, -1).flatten().tolist()
        elif isinstance(step, Add):
            unit = Fraction(step.form.scale)
            scales = [Fraction(float(scale.max())) / unit for scale in step.scales]
            pairs = zip(*(value.flatten().tolist() for value in given), strict=True)
            exact = [sum(q * s for q, s in zip(pair, scales, strict=True)) for pair in pairs]
            got = made[0].flatten().tolist()
        elif isinstance(step, Quantize):
            scale = Fraction(step.form.scale)
            exact = [Fraction(float(v)) / scale for v in given[0].flatten()]
            got = made[0].flatten().tolist()
        else:
            return
        low = 0 if step.relu else -128
        want = [min(max(rounded(value, rounding), low), 127) for value in exact]
        ties += sum((2 * value).denominator == 1 and value.denominator == 2 for value in exact)
        assert got == want
        checked.add(step.op)

    model.run(X, observe=see)
    assert checked >= {"quantize", "conv", "add"}
    assert ties > 20
    returned = model(X)  # by the steps that are fused for speed
    assert torch.equal(returned, model.run(X)[0])


def test_roundings_differ_and_survive_saving(tmp_path):
    net = calibrated()
    made = {name: simulate(net, X, rounding=name) for name in ("half_even", "half_up", "half_away")}
    values = {
        name: torch.cat([r.value.flatten() for r in model.run(X)[1].values() if r.scale])
        for name, model in made.items()
    }
    assert not torch.equal(values["half_even"], values["half_up"])
    assert not torch.equal(values["half_away"], values["half_up"])
    rounds = [step for step in simulate(net, X).steps if isinstance(step, Rounds)]
    assert rounds
    assert all(step.is_default for step in rounds)
    made["half_up"].save(tmp_path / "m")
    assert torch.equal(IntegerModel.load(tmp_path / "m")(X), made["half_up"](X))
    assert compare(net, made["half_up"], [X]).wrong == ()


@pytest.mark.parametrize("setting", [{"rounding": "down"}, {"arithmetic": "float32"}])
def test_unknown_settings(setting):
    with pytest.raises(ValueError, match=r"simulate: (rounding|arithmetic)='(down|float32)'"):
        simulate(calibrated(), X, **setting)
