"""Unsigned activations: integers 0…255 with the scale amax / 255, or 0…15, by int64 loops."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_int8sim import IntegerModel, simulate
from bevquant_qnn import PrecisionPlan, QuantConfig, apply_precision, quantize_model
from bevquant_quantizers import calibrate


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU6(),
        nn.Conv2d(8, 4, 1),
    )  # fmt: skip
    x = torch.randn(2, 3, 12, 12)
    quantized: Any = quantize_model(net.eval(), QuantConfig(unsigned=True), x).model
    calibrate(quantized, [x], progress=False)
    return quantized, x


def sums(layer: Any, q: Tensor, scale: float, padding: int) -> tuple[Tensor, Tensor]:
    """Sums of products in int64, and their scale."""
    amax = layer._weight_quantizer.amax.double().reshape(-1)
    largest = 2 ** (layer._weight_quantizer.num_bits - 1) - 1
    step = amax / largest
    steps = torch.round(layer.weight.detach().double() / step[:, None, None, None])
    unit = step * scale
    bias = torch.round(layer.bias.detach().double() / unit).long()
    made = F.conv2d(q.double(), steps, padding=padding).long() + bias[:, None, None]
    return made, unit[:, None, None]


@pytest.mark.bits
@pytest.mark.parametrize(("precision", "top"), [("int8", 255), ("w4a4", 15)])
def test_integers_are_those_of_loops(model: Any, precision: Any, top: int) -> None:
    quantized, x = copy.deepcopy(model)
    plan = PrecisionPlan.by_hand(quantized, {"0": "int8"}, precision)
    apply_precision(quantized, plan)
    integer = simulate(quantized, x)
    assert not integer.float_fallbacks
    x = 2 * x  # beyond the ranges
    _, made = integer.run(x)
    scales = [
        float(quantized[0]._input_quantizer.amax) / 127,
        float(quantized[2]._input_quantizer.amax) / top,
        float(quantized[4]._input_quantizer.amax) / top,
    ]
    q = torch.clamp(torch.round(x.double() / scales[0]), -128, 127).long()
    got = {record.path: record for record in made.values() if record.op == "conv"}
    for path, place in (("0", 0), ("2", 1)):
        total, unit = sums(quantized[int(path)], q, scales[place], 1)
        q = torch.clamp(torch.round(total * unit / scales[place + 1]), 0, top).long()
        if path == "2":
            q = q.clamp(max=round(6 / scales[2]))
        assert torch.equal(got[path].value.long(), q)
        assert int(q.max()) > top // 2


def test_saved_models_are_read_again(model: Any, tmp_path: Path) -> None:
    quantized, x = model
    integer = simulate(quantized, x)
    integer.save(tmp_path / "net")
    assert torch.equal(IntegerModel.load(tmp_path / "net")(x), integer(x))
    forms = [str(value.form) for value in integer.program.values.values()]
    assert forms.count("uint8") == 2
    exact = quantized(x).detach()
    assert float((integer(x) - exact).abs().max()) < 0.02 * float(exact.abs().max())
