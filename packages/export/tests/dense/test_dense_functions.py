"""Functions of floats beside integers: written as torch computes them, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevquant_export import export_qdq_onnx
from bevquant_int8sim import simulate

Fixture = Callable[..., Any]

FLOATS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "mean of all": lambda x: torch.mean(x),
    "sum": lambda x: torch.sum(x, 1),
    "clamp": lambda x: x.clamp(-0.2, 0.3),
    "at least": lambda x: torch.clamp(x, min=-0.2),
    "matmul": lambda x: torch.matmul(x, x.transpose(-1, -2)),
    "glu": lambda x: F.glu(x, 1),
    "power": lambda x: x**2,
    "sine": lambda x: x.sin() * x.reciprocal().cos(),
    "softmax": lambda x: torch.softmax(x, 1),
    "softmax at the end": lambda x: F.softmax(x, dim=-1),
    "repeat": lambda x: x.sigmoid().repeat(1, 1, 1, 2),
    "reflect": lambda x: F.pad(x.sigmoid(), (1, 1, 2, 0), mode="reflect"),
}


class Behind(nn.Module):
    """A function of floats behind a convolution in integers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(4, 4, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


@pytest.mark.parametrize("name", FLOATS)
def test_functions_of_floats_are_torchs(
    name: str, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(2, 4, 6, 6)
    model = calibrated(Behind(FLOATS[name]), x)
    want = simulate(model, x)(x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx")
    (made,), _ = run(file, x, optimised=False)
    torch.testing.assert_close(made, want, rtol=1e-4, atol=1e-5)
    export_qdq_onnx(model, x, tmp_path / "mapper.onnx", "horizon")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.mean(x, 1, dtype=torch.float64).float(),
        lambda x: F.layer_norm(x, (6, 6)),
        lambda x: torch.clamp(x, x.mean(), None),
        lambda x: F.pad(x.sigmoid(), (1, 1, 1, 1), mode="circular"),
        lambda x: F.softplus(x, threshold=1),
    ],
)
def test_functions_with_other_arguments_are_refused(
    function: Callable[[Tensor], Tensor], calibrated: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(2, 4, 6, 6)
    with pytest.raises(ValueError, match=r"of floats has no form in profile 'tensorrt' \(value"):
        export_qdq_onnx(calibrated(Behind(function), x), x, tmp_path / "net.onnx")


OFF = {
    "conv": ["0._input_quantizer", "0._weight_quantizer"],
    "conv with quantized weights": ["0._input_quantizer"],
    "pool": ["2._input_quantizer"],
    "transposed": ["3._input_quantizer", "3._weight_quantizer"],
    "linear": ["5._input_quantizer", "5._weight_quantizer"],
}


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime"])
@pytest.mark.parametrize("name", OFF)
def test_layers_whose_quantizers_are_off_stay_float(
    name: str, profile: str, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip
    x = torch.randn(2, 4, 8, 8)
    model = calibrated(net, x)
    for path in OFF[name]:
        model.get_submodule(path).disable()
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    assert (name == "pool") or any("input quantizer is off" in line for line in file.floats)
    # Optimised, a file for TensorRT is fused into other roundings.
    (made,), _ = run(file, x, optimised=profile == "onnxruntime")
    want = simulate(model, x)(x)
    torch.testing.assert_close(made, want, rtol=0, atol=2e-6)


def test_a_layer_that_quantizes_its_input_alone_is_refused(
    calibrated: Fixture, tmp_path: Path
) -> None:
    x = torch.randn(1, 4, 8, 8)
    model = calibrated(nn.Sequential(nn.Conv2d(4, 4, 1)), x)
    model.get_submodule("0._weight_quantizer").disable()
    with pytest.raises(ValueError, match=r"0: QuantConv2d of floats .*weight quantizer is off"):
        export_qdq_onnx(model, x, tmp_path / "net.onnx")
