"""Unsigned activations in QDQ files: zero point 0, no Clip, values in both runtimes, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

from bevquant_export import compare_qdq_onnx, export_qdq_onnx, load_qdq_onnx
from bevquant_int8sim import simulate
from bevquant_qnn import QuantConfig, quantize_model
from bevquant_quantizers import calibrate


class Net(nn.Module):
    """Residual addition, ReLU6, pools, concatenation, transposed convolution, resize, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.third, self.joined = nn.Conv2d(8, 8, 1), nn.Conv2d(16, 8, 1)
        self.up, self.down = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(8, 8, 3, 2, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = nn.functional.max_pool2d((self.second(x) + x).relu(), 3, 2, 1)
        y = nn.functional.relu6(self.third(x))
        x = self.joined(torch.cat([x, y], 1)).relu()
        x = self.down(self.up(x).relu()).sigmoid()
        x = nn.functional.interpolate(x, scale_factor=2)
        return self.head(x.permute(0, 2, 3, 1))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    made = quantize_model(Net().eval(), QuantConfig(unsigned=True), x).model
    calibrate(made, [x], progress=False)
    return made, x


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("sums", [False, True])
def test_files_compute_the_simulators_integers(
    model: Any, target: str, sums: bool, tmp_path: Path
) -> None:
    pytest.importorskip(target, reason=f"{target} is not installed")
    quantized, x = model
    file = export_qdq_onnx(quantized, x, tmp_path / "net.onnx", target, integer_sums=sums)
    for inputs in (x, 4 * torch.randn(2, 3, 16, 16)):  # the second leaves the ranges
        rows = compare_qdq_onnx(file, quantized, inputs)
        assert sum(row.form == "uint8" for row in rows) >= 6
        assert sum(row.unexplained for row in rows) == 0
    graph = onnx.load(file.path).graph
    zeros = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    points = [zeros[n.input[2]] for n in graph.node if n.op_type == "QuantizeLinear"]
    assert {int(zero) for zero in points if zero.dtype == "uint8"} == {0, 128}
    assert not [node for node in graph.node if node.op_type == "Clip"]  # the type clips
    if not sums:
        read = load_qdq_onnx(file.path)
        torch.testing.assert_close(read(x), simulate(quantized, x)(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("target", ["tensorrt10", "tensorrt11", "horizon"])
def test_targets_with_signed_integers_refuse_them(model: Any, target: str, tmp_path: Path) -> None:
    quantized, x = model
    with pytest.raises(ValueError, match=r"unsigned, 0…255, .*unsigned=False"):
        export_qdq_onnx(quantized, x, tmp_path / "net.onnx", target)
    assert not list(tmp_path.iterdir())


def test_files_of_signed_models_are_as_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    quantized = quantize_model(Net().eval(), None, x).model
    calibrate(quantized, [x], progress=False)
    path = tmp_path / "net.onnx"
    file = export_qdq_onnx(quantized, x, path, "onnxruntime", weights="int8")
    zeros = [t for t in onnx.load(file.path).graph.initializer if t.name.startswith("zero_point")]
    stored = [numpy_helper.to_array(t).item() for t in zeros if t.data_type == TensorProto.UINT8]
    assert set(stored) == {128}
