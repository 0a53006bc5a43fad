"""Weight ranges are widened where a bias would leave the accumulator, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bevquant_qnn import QuantLinear, freeze, quantize_model
from bevquant_quantizers import QuantDescriptor, calibrate

LAYERS = [
    (nn.Linear(4, 3), (5, 4), 0),
    (nn.Conv2d(4, 3, 3), (1, 4, 6, 6), 0),
    (nn.ConvTranspose2d(4, 3, 3), (1, 4, 6, 6), (slice(4), 0)),
    (nn.ConvTranspose2d(4, 6, 3, groups=2), (1, 4, 6, 6), (slice(2), 0)),
]


@pytest.mark.parametrize(("layer", "shape", "first"), LAYERS)
def test_a_channel_of_next_to_nothing_holds_its_bias(
    layer: Any, shape: tuple[int, ...], first: Any
) -> None:
    model, x = nn.Sequential(layer).eval().requires_grad_(False), torch.rand(shape)
    layer.weight[first] *= 1e-6 / layer.weight[first].abs().max()
    layer.bias[0] = 0.5
    wanted = model(x)
    quantized: Any = quantize_model(model, example_inputs=x).model
    quantized[0].weight_quantizer.disable()
    calibrate(quantized, [x], method="max")
    quantized[0].weight_quantizer.enable()
    freeze(quantized)  # to the largest weights
    before = quantized[0].weight_quantizer.amax.flatten().clone()
    report = calibrate(quantized, [x], method="max")["0._weight_quantizer"]
    amax = quantized[0].weight_quantizer.amax.flatten()
    assert torch.equal(amax[1:], before[1:])
    assert before[0] == pytest.approx(1e-6)
    step = float(amax[0] / 127 * quantized[0].input_quantizer.amax / 127)
    assert 0.5 / step == pytest.approx(2.0**30)
    assert report.amax == tuple(amax.tolist())
    assert (quantized(x) - wanted).abs().max() < 0.02


def test_ranges_of_input_channels_are_left_alone() -> None:
    x = torch.rand(5, 4)
    layer = QuantLinear(4, 3, quant_desc_weight=QuantDescriptor(axis=1))
    with torch.no_grad():
        layer.weight.mul_(1e-6)
    calibrate(layer, [x], method="max")
    assert torch.equal(layer.weight_quantizer.amax, layer.weight.abs().amax(0, keepdim=True))


def test_what_has_no_range_or_no_bias_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2), nn.Linear(2, 2)).eval()
    x = torch.rand(5, 4)
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(1e-6)
        model[1].bias.zero_()
    quantized = quantize_model(model, example_inputs=x).model
    quantized[2].input_quantizer.disable()
    calibrate(quantized, [x], method="max")
    for layer in quantized:
        assert torch.equal(layer.weight_quantizer.amax, layer.weight.abs().amax(1, keepdim=True))
