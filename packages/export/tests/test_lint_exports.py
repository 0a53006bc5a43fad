"""What this package writes keeps the rules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bevquant_export.dense import export_qdq_onnx
from bevquant_export.lint import lint_onnx
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


class Net(nn.Module):
    """A stem with pooling, a residual block, an upsampled branch joined with another, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.up, self.skip = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(3, 8, 1)
        self.relu, self.head = nn.ReLU(), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = self.relu(self.second(self.relu(self.first(y))) + y)
        return self.head(torch.cat([self.relu(self.up(y)), self.skip(x)], 1))


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime", "horizon"])
def test_exported_files_have_no_finding_for_their_own_target(tmp_path: Path, profile: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    model = quantize_model(Net().eval(), example_inputs=x).model
    calibrate(model, [x])
    export_qdq_onnx(model.eval(), x, tmp_path / "net.onnx", profile)
    assert [str(f) for f in lint_onnx(tmp_path / "net.onnx", profile)] == []
    # And the rules are not empty words: no file suits the other two.
    for other in {"tensorrt", "onnxruntime", "horizon"} - {profile}:
        assert lint_onnx(tmp_path / "net.onnx", other)
