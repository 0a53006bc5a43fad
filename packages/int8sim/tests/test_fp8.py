"""FP8 layers in the simulator: exact sums, their bound, comparison, files."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from bevquant_int8sim import IntegerModel, compare, simulate
from bevquant_int8sim.program import FLOAT8, Float8Layer, float8_round
from bevquant_qnn import PrecisionPlan, QuantConfig, apply_precision, quantize_model
from bevquant_quantizers import calibrate, fake_quantize, format_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.first(x).relu()
        x = (x + self.second(x)).relu()
        x = nn.functional.max_pool2d(self.up(x), 2)
        return self.head(x.permute(0, 2, 3, 1))


def calibrated(plan=None, config=None, net=None, images=None):
    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8) if images is None else images
    model = quantize_model((net or Net()).eval(), config, images).model
    calibrate(model, [images], method="mse")
    if plan is not None:
        apply_precision(model, PrecisionPlan.by_hand(model, plan, default=plan.pop("*", "int8")))
    return model, images


def layers(model):
    return {s.path: s.target for s in model.steps if isinstance(s.target, Float8Layer)}


@pytest.mark.parametrize("name", list(FLOAT8))
def test_rounding_is_that_of_fake_quantization_for_all_codes(name):
    form = FLOAT8[name]
    codes = torch.arange(256, dtype=torch.uint8).view(form.dtype).float()
    finite = codes[codes.isfinite()]
    for scale in (1.0, 0.25, float(np.float32(0.3))):
        x = finite * torch.tensor(scale)
        assert torch.equal(float8_round(x, scale, name), x)
    middles = torch.from_numpy((form.levels[1:] + form.levels[:-1]) / 2).float()
    wanted = fake_quantize(middles, torch.tensor(form.high), form.num_bits)
    assert torch.equal(float8_round(middles, 1.0, name), wanted)
    odd = float8_round(torch.tensor([math.inf, -math.inf, math.nan]), 1.0, name)
    assert odd[:2].tolist() == [form.high, -form.high]
    assert bool(odd[2].isnan())


@pytest.mark.parametrize("bits", [(4, 3), (5, 2)])
def test_whole_models_agree_with_fake_quantization(bits):
    model, images = calibrated(config=QuantConfig(num_bits=bits))
    integer = simulate(model, images)
    assert set(layers(integer)) == {"first", "second", "up", "head"}
    assert {f.what for f in integer.float_fallbacks} <= {"add", "relu"}
    with torch.no_grad():
        torch.testing.assert_close(integer(images), model(images), rtol=1e-4, atol=1e-5)


def test_sums_are_exact_in_any_order():
    """Products are multiples of 2^-18 below 2^53 in all: float64 rounds none of their sums."""
    torch.manual_seed(0)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()]
    weight = codes[torch.randint(len(codes), (5, 4096))]
    x = codes[torch.randint(len(codes), (3, 4096))].float()
    layer = Float8Layer("linear", weight, torch.ones(5), None, 1.0, "fp8_e4m3", {})
    exact = (x.double() * 2**9).long() @ (weight.double() * 2**9).long().T
    assert int(exact.abs().max()) > 2**30
    assert torch.equal(layer(x), (exact.double() / 2**18).float())
    order = torch.randperm(4096)
    other = Float8Layer("linear", weight[:, order], torch.ones(5), None, 1.0, "fp8_e4m3", {})
    assert torch.equal(layer(x), other(x[:, order]))


def _sequential(products, bits):
    """Sums term after term, each result rounded down to `bits` significand bits."""
    total = torch.zeros(products.shape[:-1], dtype=torch.float64)
    for term in products.unbind(-1):
        mantissa, exponent = torch.frexp(total + term)
        total = torch.ldexp((mantissa * 2.0**bits).trunc(), exponent - bits)
    return total


@pytest.mark.parametrize("bits", [24, 14])
def test_other_orders_stay_within_the_bound(bits):
    torch.manual_seed(1)
    model, images = calibrated(config=QuantConfig(num_bits=(4, 3)))
    layer = layers(simulate(model, images))["head"]
    x = torch.randn(64, 6) * 3
    scale = torch.tensor(layer.input_scale)
    q = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    terms = q[:, None, :] * layer.weight.double()
    exact, bound = layer(x).double(), layer.bound(x, bits=bits)
    largest = 0.0
    for _ in range(20):
        sums = _sequential(terms[..., torch.randperm(6)], bits)
        unit = layer.weight_scale.double() * layer.input_scale
        made = sums * unit + layer.bias.double()
        apart = (made - exact).abs()
        assert bool((apart <= bound).all())
        largest = max(largest, float((apart / bound).max()))
    assert largest > 0.01  # and the bound is not without meaning


def test_layers_equal_a_float64_convolution_of_dequantized_values():
    model, images = calibrated(config=QuantConfig(num_bits=(4, 3)))
    made = {}

    def see(step, given, out):
        if isinstance(step.target, Float8Layer):
            made[step.path] = step, given, out

    simulate(model, images).run(images, observe=see)
    for path, module in (("first", model.first), ("second", model.second), ("up", model.up)):
        step, given, out = made[path]
        twin = copy.deepcopy(step.target)
        weight = twin.weight.double()
        along = 1 if path == "up" else 0
        shape = [1] * weight.dim()
        shape[along] = -1
        scaled = weight * twin.weight_scale.double().reshape(shape)
        conv = nn.functional.conv_transpose2d if path == "up" else nn.functional.conv2d
        settings = {"stride": module.stride, "padding": module.padding, "groups": module.groups}
        wanted = conv(given[0].double(), scaled, module.bias.double(), **settings)
        torch.testing.assert_close(out[0].double(), wanted, rtol=1e-6, atol=1e-7)


def test_plans_mix_formats():
    model, images = calibrated({"first": "fp8", "up": "fp8", "head": "float"})
    integer = simulate(model, images)
    assert set(layers(integer)) == {"first", "up"}
    ops = {step.op for step in integer.steps}
    assert {"conv", "quantize"} <= ops  # `second` in int8
    with torch.no_grad():
        torch.testing.assert_close(integer(images), model(images), rtol=0.02, atol=0.02)


def test_weights_of_another_format_stay_float_and_say_so():
    model, images = calibrated(config=QuantConfig(num_bits=(4, 3), weight_bits=8))
    integer = simulate(model, images)
    assert not layers(integer)
    reasons = {f.reason for f in integer.float_fallbacks}
    assert any("fp8_e4m3 and its weight is not" in reason for reason in reasons)
    with torch.no_grad():
        torch.testing.assert_close(integer(images), model(images), rtol=1e-4, atol=1e-5)


def test_a_comparison_names_the_format_and_claims_no_equal_integers():
    net = Net().eval()
    model, images = calibrated(config=QuantConfig(num_bits=(4, 3)), net=net)
    table = compare(net, model, [images])
    assert not table.wrong
    rows = {(row.path, row.op): row for row in table.rows}
    quantized = [row for row in table.rows if row.form == "fp8_e4m3"]
    assert quantized
    assert all(row.max_steps is None and row.integer_sqnr_db > 20 for row in quantized)
    assert rows["first", "conv"].form == "fp8_e4m3"
    assert "compared in dB" in str(table)


def test_a_wrong_layer_is_found():
    model, images = calibrated(config=QuantConfig(num_bits=(4, 3)))
    graph_model = copy.deepcopy(model)
    integer = simulate(graph_model, images, verify=False)
    layers(integer)["first"].weight_scale.mul_(1.01)
    from bevquant_int8sim.model._verify import verify_model

    with pytest.raises(ValueError, match="first"):
        verify_model(integer, images)


def test_a_wrong_rounding_is_found():
    from dataclasses import replace

    from bevquant_int8sim.model._verify import verify_model

    model, images = calibrated(config=QuantConfig(num_bits=(4, 3)))
    integer = simulate(model, images, verify=False)
    step = next(s for s in integer.steps if s.target is float8_round)
    worse = replace(step, args=(step.args[0], step.args[1] * 1.5, step.args[2]))
    steps = tuple(worse if s is step else s for s in integer.steps)
    broken = IntegerModel(replace(integer.program, steps=steps), integer.source)
    with pytest.raises(ValueError, match="differs by"):
        verify_model(broken, images)


def test_saved_models_compute_the_same(tmp_path):
    model, images = calibrated({"*": "fp8", "second": "int8"})
    integer = simulate(model, images)
    integer.save(tmp_path / "model")
    loaded = IntegerModel.load(tmp_path / "model")
    assert torch.equal(loaded(images), integer(images))
    assert layers(loaded)["first"].weight.dtype == torch.float8_e4m3fn


def test_channels_of_zeros_and_tiny_biases():
    net = Net()
    with torch.no_grad():
        net.first.weight[2] = 0
        net.first.bias[2] = 1e-3
    model, images = calibrated(config=QuantConfig(num_bits=(4, 3)), net=net)
    integer = simulate(model, images)
    layer = layers(integer)["first"]
    assert not bool(layer.weight[2].float().any())
    assert float(layer(images)[0, 2, 0, 0]) == pytest.approx(1e-3)


def test_no_range_is_refused():
    images = torch.randn(2, 3, 8, 8)
    model = quantize_model(Net().eval(), QuantConfig(num_bits=(4, 3)), images).model
    with pytest.raises(ValueError, match="not calibrated"):
        simulate(model, images)


def test_formats_are_those_of_quantizers():
    assert FLOAT8 == {f.name: f for f in (format_of((4, 3)), format_of((5, 2)))}
