"""Results of several tensors between CPU and BPU, and parameters in arithmetic, up to the file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat_fx,
)

Fixture = Callable[..., Any]
PROFILES = ("horizon", "onnxruntime")


class Split(nn.Module):
    """A function between two convolutions, with parameters of its own."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.last = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1)
        self.norm = nn.BatchNorm2d(6)
        self.weight = nn.Parameter(torch.rand(1, 6, 1, 1) + 0.5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.last(self.function(self, self.first(self.quant(x)))))


TUPLES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "tensor_split": lambda m, x: torch.cat(x.tensor_split(3, 1)[::-1], 1),
    "chunk": lambda m, x: torch.cat(x.chunk(3, 1), 1),
    "split": lambda m, x: torch.cat(x.split([1, 5], 1)[::-1], 1),
    "unbind": lambda m, x: torch.stack(x.unbind(1)[::-1], 1),
    "topk": lambda m, x: x.topk(6, 1)[0],
    "max": lambda m, x: x + x.max(1, keepdim=True).values,
    "min": lambda m, x: x + torch.min(x, 1, True)[0],
    "sort": lambda m, x: torch.sort(x, 1).values,
    "aminmax": lambda m, x: x - x.aminmax(dim=1, keepdim=True).min,
    "var_mean": lambda m, x: x - torch.var_mean(x, 1, keepdim=True)[1],
}
PARAMETERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "product": lambda m, x: x * (m.weight * 2 + 1),
    "exp": lambda m, x: x * m.weight.exp(),
    "where": lambda m, x: torch.where(x > 0, x, m.weight * x),
    "batch_norm": lambda m, x: F.batch_norm(
        x, m.norm.running_mean, m.norm.running_var, m.norm.weight, m.norm.bias, False, 0.1, 1e-5
    ),
    "group_norm": lambda m, x: F.group_norm(x, 3, m.norm.weight, m.norm.bias),
    "conv": lambda m, x: F.conv2d(x, m.weight.expand(6, 6, 1, 1) * 0.3, m.norm.bias),
}


@pytest.mark.parametrize("name", [*TUPLES, *PARAMETERS])
def test_from_calibration_to_the_file(name: str, export: Any, tmp_path: Any) -> None:
    torch.manual_seed(0)
    net = Split({**TUPLES, **PARAMETERS}[name]).eval()
    x, other = torch.randn(2, 2, 6, 6, 6)
    calibrated = prepare_calibration_fx(net, {"": get_default_calib_qconfig()}, hybrid=True).eval()
    assert torch.allclose(calibrated(x), net(x), atol=1e-5)
    qat = prepare_qat_fx(calibrated, {"": get_default_qat_qconfig()}, hybrid=True).eval()
    wanted, got = net(x), qat(x)
    assert (got - wanted).norm() < 0.05 * wanted.norm()
    for profile in PROFILES:
        file = export.export_qdq_onnx(qat, x, tmp_path / f"{profile}.onnx", profile)
        assert sum(d.unexplained for d in export.compare_qdq_onnx(file, qat, other)) == 0


def test_parts_of_a_tuple_have_the_range_of_all() -> None:
    net = Split(TUPLES["tensor_split"]).eval()
    net.first.bias.data[4:] += 50  # the last part is the largest
    x = torch.randn(2, 6, 6, 6)
    qat = prepare_qat_fx(net, {"": get_default_qat_qconfig()}, hybrid=True).train()
    qat(x)
    boundary = qat.tensor_split_activation_post_process
    largest = float(qat.first(qat.quant(x)).dequantize().detach().abs().max())
    assert float(boundary.scale) * 127.5 == pytest.approx(largest, rel=0.02)
    integers = convert_fx(qat.eval())
    assert (integers(x) - qat(x)).norm() < 0.02 * qat(x).norm()


def test_indices_of_a_tuple_stay_as_they_are() -> None:
    net = Split(lambda m, x: x.gather(1, (x + x.median(1, keepdim=True)[0]).topk(6, 1)[1])).eval()
    x = torch.randn(2, 6, 6, 6)
    qat = prepare_qat_fx(net, {"": get_default_qat_qconfig()}, hybrid=True).eval()
    qat.train()(x)
    assert (qat.eval()(x) - net(x)).norm() < 0.2 * net(x).norm()
