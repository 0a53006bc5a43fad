"""Concatenations whose result is wanted in float: integers are joined, then dequantized."""

import torch
from torch import nn

from bevquant_int8sim import simulate
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
    assert kinds.index("layout") < kinds.index("dequantize")
