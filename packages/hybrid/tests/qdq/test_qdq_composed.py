"""Modules out of several quantized parts, and selections of integers: files round as they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_hybrid.quantization import (
    DeQuantStub,
    FakeQuantState,
    QuantStub,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)


class Between(nn.Module):
    """A function of a layer, between stubs."""

    def __init__(self, layer: nn.Module, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.function(self.layer, self.quant(x)))


def group_norm(groups: int, channels: int) -> nn.Module:
    made = nn.GroupNorm(groups, channels)
    nn.init.uniform_(made.weight, 0.5, 1.5)
    nn.init.normal_(made.bias)
    return made


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, tuple[int, ...]]] = {
    "group_norm": (lambda: group_norm(2, 6), lambda m, x: m(x), (2, 6, 8, 8)),
    "group_norm_twice": (lambda: group_norm(3, 6), lambda m, x: m(m(x)), (2, 6, 4, 4, 4)),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2), lambda m, x: m(x, x, x)[0], (5, 2, 8),
    ),
    "attention_of_one": (
        lambda: nn.MultiheadAttention(8, 2), lambda m, x: m(x, x, x)[0], (5, 8),
    ),
    "lstm_cell_without_state": (lambda: nn.LSTMCell(8, 6), lambda m, x: m(x)[0], (5, 8)),
    "lstm_cell": (lambda: nn.LSTMCell(8, 8), lambda m, x: m(x, m(x, (x, x)))[1], (5, 8)),
    "sort": (lambda: nn.LayerNorm(8), lambda m, x: m(x.sort(1)[0]), (2, 6, 8)),
    "topk": (lambda: nn.LeakyReLU(0.2), lambda m, x: m(x.topk(2, 1)[0]), (2, 6, 8)),
    "min": (nn.Identity, lambda m, x: x - x.min(1, keepdim=True)[0], (2, 6, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_files_round_as_every_part_does(name: str, export: Any, tmp_path: Any) -> None:
    torch.manual_seed(0)
    layer, function, shape = MODELS[name]
    x, net = torch.randn(2, *shape), Between(layer(), function).eval()
    calibrated = prepare_calibration_fx(net, {"": get_default_calib_qconfig()}).eval()
    for frame in x:
        calibrated(frame)
    qat = prepare_qat_fx(calibrated, {"": get_default_qat_qconfig()}).eval()
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    file = export.export_qdq_onnx(qat, x[0], tmp_path / "file.onnx", "horizon")
    rows = export.compare_qdq_onnx(file, qat, x[1])
    # A softmax is one operator in files, and rounds to 16 bits inside in the model.
    assert not [row for row in rows if row.unexplained and "softmax" not in row.path]
    assert all(row.largest <= 1 for row in rows if row.unexplained)


def test_an_eager_model_is_exported_by_its_parts(export: Any, tmp_path: Any) -> None:
    layer, function, shape = MODELS["attention"]
    net, x = Between(layer(), function).eval(), torch.randn(shape)
    net.qconfig = get_default_qat_qconfig()
    qat = prepare_qat(net)
    qat(x)
    file = export.export_qdq_onnx(qat.eval(), x, tmp_path / "file.onnx", "horizon")
    rows = export.compare_qdq_onnx(file, qat, x)
    assert {row.path for row in rows} >= {"layer.q_proj", "layer.context", "layer.out_proj"}


def prepared(norm: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, nn.Module, Tensor]:
    """A batch norm downstream of a linear layer with six outputs."""
    torch.manual_seed(0)
    norm.running_mean.normal_()
    net = Between(nn.Sequential(nn.Linear(6, 6), norm), lambda m, x: m(x)).eval()
    made = prepare_calibration_fx(net, {"": get_default_calib_qconfig()}).eval()
    return net, made, torch.randn(shape)


@pytest.mark.parametrize("channels", [5, 6])
def test_norm_of_another_axis_is_not_folded_into_a_linear_layer(channels: int) -> None:
    net, made, x = prepared(nn.BatchNorm2d(channels), (4, channels, 6, 6))
    assert torch.allclose(made(x), net(x), atol=1e-5)


def test_folded_norm_of_rows_takes_rows_alone() -> None:
    net, made, x = prepared(nn.BatchNorm1d(6), (4, 6))
    assert torch.allclose(made(x), net(x), atol=1e-5)
    with pytest.raises(ValueError, match=r"layer\.0: its input has shape \(4, 6, 6\)"):
        made(torch.randn(4, 6, 6))
