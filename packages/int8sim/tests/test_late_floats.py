"""Concatenations whose result is wanted in float: integers are joined, then dequantized."""

import pytest
import torch
from torch import nn

from bevquant_int8sim import dequantize, simulate
from bevquant_int8sim.model._rowwise import dequantized
from bevquant_qnn import quantize_model
from bevquant_quantizers import TensorQuantizer, calibrate
from bevquant_quantizers.tensor_quant import QuantDescriptor


class Branches(nn.Module):
    """Two convolutions side by side, and one range for both."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 24, 3, padding=1)
        self.range = TensorQuantizer(QuantDescriptor())

    def forward(self, x):
        return self.range(torch.cat([torch.relu(self.left(x)), torch.relu(self.right(x))], 1))


def test_joined_integers_become_floats_once(backend):
    torch.manual_seed(0)
    x = torch.randn(1, 4, 30, 31)
    net = quantize_model(Branches().eval(), example_inputs=(x,)).model
    with torch.no_grad():
        calibrate(net, [(x,)], method="max")
    model = simulate(net, (x,), backend=backend)
    plain, _ = model.run((x,))
    assert torch.equal(model(x), plain)
    kinds = [step.op for step in model._fast.steps]
    assert kinds.count("dequantize") == 1
    assert kinds.index("move") < kinds.index("dequantize")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_dequantized_in_one_pass(dtype, memory_format):
    q = torch.randint(-128, 128, (2, 24, 31, 37)).to(dtype).contiguous(memory_format=memory_format)
    scales = torch.rand(24, dtype=torch.float64) + 0.01
    for scale, relu in ((scales, True), (scales[0], False)):
        values = dequantize(q, scale, axis=1)
        found = dequantized(q, scale, 1, relu=relu)
        assert torch.equal(found, values.clamp(min=0) if relu else values)
