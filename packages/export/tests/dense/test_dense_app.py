"""BEVFusion's dense parts, in the size that tests can hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_export import compare_qdq_onnx, export_qdq_onnx

Fixture = Callable[..., Any]


class Chain(nn.Module):
    """A backbone and its neck."""

    def __init__(self, backbone: nn.Module, neck: nn.Module) -> None:
        super().__init__()
        self.backbone, self.neck = backbone, neck

    def forward(self, x: Tensor) -> Any:
        return self.neck(self.backbone(x))


@pytest.fixture(params=["camera", "decoder"])
def part(request: pytest.FixtureRequest, calibrated: Fixture) -> tuple[str, nn.Module, Tensor]:
    model_of = pytest.importorskip("bevfusion_quant.model", reason="the app is not installed")
    model = model_of.build_model(model_of.CONFIGS["tiny"]).eval()
    if request.param == "camera":
        parts, x = model.encoders["camera"], torch.randn(1, 3, 96, 256)
    else:
        parts, x = model.decoder, torch.randn(1, 32, 40, 40).relu_()
    net = Chain(parts["backbone"], parts["neck"])
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return request.param, calibrated(net, x), x


def test_onnxruntime_makes_the_simulators_integers(
    part: tuple[str, nn.Module, Tensor], run: Fixture, tmp_path: Path
) -> None:
    name, model, x = part
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    _, operators = run(file, x)
    assert operators["QLinearConv"] == {"camera": 15, "decoder": 6}[name]
    differences = compare_qdq_onnx(file, model, x)
    for d in differences:
        # The runtime interpolates in other steps, and its float32 multipliers tell apart what
        # lies within 1e-5 of half a step.
        assert d.largest <= 1, d
        share = 0.05 if d.op == "resize" else 1e-4
        assert d.different <= share * d.elements, d
    exact = [d for d in differences if d.op in ("quantize", "max_pool", "layout")]
    assert exact
    assert not any(d.different for d in exact)


def test_the_camera_runs_wholly_in_integers_on_request(
    part: tuple[str, nn.Module, Tensor], run: Fixture, tmp_path: Path
) -> None:
    name, model, x = part
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime", integer_sums=True)
    _, operators = run(file, x)
    # What is returned in float is a float convolution.
    returned = {"camera": 2, "decoder": 0}[name]
    assert operators["Conv"] + operators["FusedConv"] == returned
    assert operators["QLinearAdd"] == {"camera": 4, "decoder": 0}[name]
    assert max(d.largest for d in compare_qdq_onnx(file, model, x)) <= 1


@pytest.mark.parametrize("profile", ["tensorrt", "horizon"])
def test_other_files_say_the_same(
    profile: str, part: tuple[str, nn.Module, Tensor], tmp_path: Path
) -> None:
    _, model, x = part
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    for d in compare_qdq_onnx(file, model, x):
        assert d.largest <= 1, d
        assert d.different <= (0.05 if d.op == "resize" else 1e-4) * d.elements, d
