"""The message of a refused tensor names the line of the forward that made it."""

import pytest
import torch
from torch import nn

from bevquant_export import export_qdq_onnx
from bevquant_export.dense._source import program_of
from bevquant_export.dense.verify._compare import verified
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


class Net(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.last = nn.Conv2d(4, 2, 1)
        nn.init.constant_(self.conv.weight, factor)

    def forward(self, x):
        return self.last(self.conv(x))


def test_the_line_of_the_forward_is_named(tmp_path):
    x = torch.randn(1, 3, 4, 4)
    made = []
    for factor in (0.5, -0.5):
        torch.manual_seed(0)
        model = quantize_model(Net(factor).eval(), example_inputs=(x,)).model
        calibrate(model, [(x,)])
        file = export_qdq_onnx(model, (x,), tmp_path / f"{factor}.onnx", "onnxruntime")
        made.append((file, model))
    (file, model), (other, _) = made
    integer = program_of(model, (x,), False, verify=False)
    content = other.path.read_bytes()
    with pytest.raises(ValueError, match=r"conv \(conv, \S*test_refused_line\.py:\d+, "):
        verified(file, content, integer, (x,), integer_sums=False)
