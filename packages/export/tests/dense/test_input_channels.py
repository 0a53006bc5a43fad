"""Ranges by input channel in files: a product of floats in front, and the simulator's integers."""

import copy

import pytest
import torch
from torch import nn

from bevquant_export import compare_qdq_onnx, cpu_at_hand, export_qdq_onnx, lint_onnx
from bevquant_int8sim import simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate

UNITS = torch.tensor([140.0, 80, 4, 255, 0.4, 0.4, 0.4, 0.32])


class Points(nn.Module):
    """Two readers of one tensor, as a pillar encoder with a branch."""

    def __init__(self):
        super().__init__()
        self.first, self.branch = nn.Linear(8, 16), nn.Linear(8, 16)
        self.last = nn.Linear(16, 4)
        for layer in (self.first, self.branch):
            layer.weight.data /= UNITS

    def forward(self, x):
        return self.last(torch.cat([self.first(x)[..., :8], self.branch(x)[..., :8]], -1).relu())


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.last = nn.ConvTranspose2d(8, 16, 2, 2, groups=2), nn.Conv2d(16, 4, 3)
        self.up.weight.data /= UNITS[:, None, None, None]

    def forward(self, x):
        return self.last(self.up(x).relu())


def frame(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(*shape, 8, generator=generator) - 0.5) * UNITS


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt11", "openvino", "horizon"])
@pytest.mark.parametrize("kind", [Points, Up])
def test_files_hold_the_simulators_integers(kind, target, tmp_path):
    torch.manual_seed(0)
    net = kind().eval()
    frames = [frame(i, 1, 8, 8) if kind is Up else frame(i, 40) for i in range(2)]
    frames = [f.permute(0, 3, 1, 2).contiguous() if kind is Up else f for f in frames]
    model = quantize_model(copy.deepcopy(net), example_inputs=frames[0]).model
    assert calibrate(model, frames[:1]).poor == ()
    integers = simulate(model, frames[0])
    reasons = {f.reason for f in integers.float_fallbacks}
    assert reasons == {"its input's channels have ranges of their own: x·f, then one range for all"}
    clean = net(frames[1]).detach()
    noise = (clean - integers(frames[1])).square().sum()
    assert float(clean.square().sum() / noise) > 10**3.3
    made = export_qdq_onnx(model, frames[0], tmp_path / "net.onnx", target)
    rows = compare_qdq_onnx(made, model, frames[1])
    assert sum(row.unexplained for row in rows) == 0
    in_float = target == "openvino" and cpu_at_hand() == "any"  # its weights are uint8
    assert {f.id for f in lint_onnx(made.path, target)} == ({"OVN001"} if in_float else set())
