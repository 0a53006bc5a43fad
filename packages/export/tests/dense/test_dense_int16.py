"""Activations of 16 bits in QDQ files: nodes, values in ONNX Runtime, refusals, the linter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from bevquant_export import (
    compare_qdq_onnx,
    cpu_at_hand,
    export_qdq_onnx,
    lint_onnx,
    load_qdq_onnx,
    open_onnx,
)
from bevquant_int8sim import simulate
from bevquant_qnn import PrecisionPlan, QuantConfig, apply_precision, quantize_model
from bevquant_quantizers import calibrate

onnxruntime = pytest.importorskip("onnxruntime")


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.last = nn.Conv2d(6, 6, 1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = nn.functional.relu6(x + self.second(x))
        x = torch.cat([nn.functional.max_pool2d(self.up(x).relu(), 2), x[:, :2]], 1)[:, 1:7]
        x = nn.functional.interpolate(self.last(x).relu(), scale_factor=2, mode="bilinear")
        return self.head(x.permute(0, 2, 3, 1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(16), nn.Linear(16, 48)
        self.out, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) * 0.25).softmax(-1)
        return self.last(nn.functional.gelu(x + self.out(scores @ v)))


def calibrated(net: nn.Module, x: Tensor, **settings: Any) -> nn.Module:
    settings = {"num_bits": 16, "weight_bits": 8, **settings}
    model = quantize_model(net.eval(), QuantConfig(**settings), x).model
    calibrate(model, [x], method="max")
    return model


@pytest.mark.parametrize(("net", "shape"), [(Maps, (2, 3, 8, 8)), (Attention, (2, 10, 16))])
def test_files_compute_the_models_values(net: Any, shape: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = calibrated(net(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    assert file.opset == 21
    kinds = {t.data_type for t in onnx.load(file.path).graph.initializer}
    assert TensorProto.INT16 in kinds
    assert (TensorProto.UINT8 in kinds) == (cpu_at_hand() == "any")  # the weights
    other = torch.randn(shape)
    rows = compare_qdq_onnx(file, model, other)
    assert {row.form for row in rows} == {"int16"}
    assert all(row.unexplained == 0 for row in rows)
    # The whole file with all optimisations: no layer in fewer bits, no pair left out.
    (made,) = open_onnx(file.path, "onnxruntime")({next(iter(file.inputs)): other}).values()
    wanted = simulate(model, x)(other)
    assert float((made - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())
    read = load_qdq_onnx(file.path, (x,))
    torch.testing.assert_close(read(other), wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


def test_integers_are_equal_on_ties_and_beyond_the_range(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 8, 8)
    model = calibrated(nn.Sequential(nn.Linear(8, 4)), x)
    model[0]._input_quantizer.amax = torch.tensor(32767 * 2.0**-12)
    x = torch.arange(-40000, 40000).view(1, -1, 8) * 2.0**-12 + 2.0**-13
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    (row,) = file.differences
    assert (row.elements, row.different) == (80_000, 0)


def test_plans_mix_formats_by_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = calibrated(Maps(), x, num_bits=8)
    plan = {"second": "int16", "up": "fp8", "head": "int16"}
    apply_precision(model, PrecisionPlan.by_hand(model, plan))
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime", dynamic_batch=True)
    assert {row.form for row in file.differences} == {"int8", "int16", "fp8_e4m3"}
    assert all(row.unexplained == 0 for row in compare_qdq_onnx(file, model, torch.randn(x.shape)))
    kinds = {t.data_type for t in onnx.load(file.path).graph.initializer}
    assert {TensorProto.UINT8, TensorProto.INT16, TensorProto.FLOAT8E4M3FN} <= kinds


def test_layers_of_8_bits_upstream_of_16_run_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(500, 256)
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 32))
    model = calibrated(net, x, num_bits=8)
    apply_precision(model, PrecisionPlan.by_hand(model, {"2": "int16"}))
    calibrate(model, [x])
    rows = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime").differences
    assert {row.form for row in rows} == {"int8", "int16"}
    assert sum(row.ties for row in rows) > 0  # sums of 256 float32 products, steps of 1/32,767


def test_a_changed_weight_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = calibrated(Maps(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    proto = onnx.load(file.path)
    tensor = next(t for t in proto.graph.initializer if t.name == "first.weight")
    values = numpy_helper.to_array(tensor).copy()
    values[0, 0] ^= 1
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(proto, file.path)
    rows = {row.path: row for row in compare_qdq_onnx(file, model, x)}
    assert rows["first"].is_wrong


@pytest.mark.parametrize("profile", ["tensorrt10", "tensorrt11", "openvino", "horizon"])
def test_runtimes_without_int16_refuse_it(profile: str, tmp_path: Path) -> None:
    x = torch.randn(2, 10, 16)
    model = calibrated(Attention(), x)
    with pytest.raises(ValueError, match=r"16 bits; expected 8 \(16 with profile='onnxruntime'\)"):
        export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("target", "opset", "rules"),
    [
        ("onnxruntime", 21, set()),
        ("onnxruntime", 19, {"QDQ005"}),
        ("tensorrt10", 21, {"QDQ007"}),
        ("openvino", 21, {"QDQ007"}),
    ],
)
def test_the_linter_knows_int16(target: str, opset: int, rules: set[str], tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], name="dq"),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", 1, [4])],
        [helper.make_tensor_value_info("y", 1, [4])],
        [numpy_helper.from_array(np.float32(1), "s"), numpy_helper.from_array(np.int16(0), "z")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.save(model, tmp_path / "net.onnx")
    found = lint_onnx(tmp_path / "net.onnx", target)
    assert {f.id for f in found if f.id[:3] in ("TRT", "QDQ", "ORT")} == rules


def test_openvino_drops_pairs_of_int16(tmp_path: Path) -> None:
    """Where a later version does not, its profile may take int16."""
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    x = torch.randn(2, 10, 16)
    model = calibrated(Attention(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    far = 4 * torch.randn(2, 10, 16)  # beyond the ranges
    given = {next(iter(file.inputs)): far}
    (right,), (other,) = (
        open_onnx(file.path, target)(given).values() for target in ("onnxruntime", "openvino")
    )
    assert float((other - right).abs().max()) > 0.05 * float(right.abs().max())
