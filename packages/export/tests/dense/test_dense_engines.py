"""Files for one CPU or one version: weights, transposed convolutions, OpenVINO, half types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from bevquant_export import (
    QdqFile,
    compare_qdq_onnx,
    cpu_at_hand,
    export_float_onnx,
    export_qdq_onnx,
    lint_onnx,
    open_onnx,
)
from bevquant_int8sim import simulate

Fixture = Callable[..., Any]
EXACT = pytest.mark.skipif(cpu_at_hand() != "vnni", reason="this CPU saturates sums of pairs")


class Upsampled(nn.Module):
    """A transposed convolution whose windows lie side by side, between two convolutions."""

    def __init__(self, kernel: int = 2, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 12, kernel, 2, groups=groups)
        self.out = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.up(torch.relu(self.first(x)))))


class Mixed(nn.Module):
    """Integers, a float function between two of them, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3)
        self.gate = nn.Sigmoid()
        self.out = nn.Conv2d(8, 4, 1)
        self.linear = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.gate(self.conv(x)))
        return self.last(torch.relu(self.linear(y.mean((2, 3)))))


def images() -> Tensor:
    return torch.randn(2, 8, 12, 12)


def operators(file: QdqFile) -> list[str]:
    return [node.op_type for node in onnx.load(file.path).graph.node]


@EXACT
def test_int8_weights_are_the_same_integers(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = images()
    model = calibrated(Upsampled(), x)
    made = {}
    for weights in ("uint8", "int8"):
        file = export_qdq_onnx(
            model, x, tmp_path / f"{weights}.onnx", "onnxruntime", weights=weights
        )
        assert max(d.different for d in compare_qdq_onnx(file, model, x)) == 0
        made[weights] = run(file, x)[0][0]
        stored = {t.data_type for t in onnx.load(file.path).graph.initializer if len(t.dims) == 4}
        assert stored == {2 if weights == "uint8" else 3}
    assert torch.equal(made["uint8"], made["int8"])


def test_the_linter_knows_for_which_cpu_a_file_is(calibrated: Fixture, tmp_path: Path) -> None:
    x = images()
    model = calibrated(Upsampled(), x)
    exported = {
        weights: export_qdq_onnx(
            model, x, tmp_path / f"{weights}.onnx", "onnxruntime", weights=weights
        )
        for weights in ("uint8", "int8")
    }
    assert lint_onnx(exported["uint8"].path, "onnxruntime") == []
    assert lint_onnx(exported["int8"].path, "onnxruntime") == []  # which says that it is for VNNI
    elsewhere = lint_onnx(exported["int8"].path, "onnxruntime", cpu="any")
    assert {f.id for f in elsewhere} == {"ORT004"}
    slow = lint_onnx(exported["uint8"].path, "onnxruntime", cpu="vnni")
    assert {f.id for f in slow} == {"ORT007"}
    assert {f.id for f in lint_onnx(exported["uint8"].path, "openvino")} == {"OVN001"}
    assert lint_onnx(exported["int8"].path, "openvino", cpu="vnni") == []
    assert {f.id for f in lint_onnx(exported["int8"].path, "openvino", cpu="any")} == {"OVN004"}
    with pytest.raises(ValueError, match="cpu 'avx'; expected one of vnni, any"):
        lint_onnx(exported["int8"].path, "onnxruntime", cpu="avx")


def test_weights_of_seven_bits_are_int8_for_any_cpu(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = images()
    model = calibrated(Upsampled(), x, weight_bits=7)
    file = export_qdq_onnx(model, x, tmp_path / "seven.onnx", "onnxruntime")
    held = [numpy_helper.to_array(t) for t in onnx.load(file.path).graph.initializer]
    held = [t for t in held if t.ndim == 4]
    assert {t.dtype.name for t in held} == {"int8"}
    assert max(abs(t).max() for t in held) == 63
    assert lint_onnx(file.path, "onnxruntime", cpu="any") == []
    assert lint_onnx(file.path, "onnxruntime", cpu="vnni") == []
    assert max(d.different for d in compare_qdq_onnx(file, model, x)) == 0


def test_the_largest_weights_that_no_cpu_saturates(
    calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    """Activations of 255 around 128 everywhere, and weights of 64: sums of pairs reach 32,640."""
    net = nn.Sequential(nn.Conv2d(64, 32, 3, bias=False), nn.Conv2d(32, 8, 1, bias=False))
    nn.init.constant_(net[0].weight, 64 / 127)
    net[0].weight.data[:, :, 1] *= -1
    x = torch.ones(1, 64, 8, 8)
    model = calibrated(net, x)
    model[0]._weight_quantizer.amax = torch.ones_like(model[0]._weight_quantizer.amax)
    file = export_qdq_onnx(model, x, tmp_path / "largest.onnx", "onnxruntime", weights="uint8")
    types = {t.name: t.data_type for t in onnx.load(file.path).graph.initializer if len(t.dims) > 1}
    assert types == {"0.weight": 3, "1.weight": 2}
    for frame in (x, -x, torch.randn(1, 64, 8, 8).sign()):
        assert max(d.different for d in compare_qdq_onnx(file, model, frame)) == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_windows_side_by_side_are_a_1x1_convolution(
    groups: int, calibrated: Fixture, run: Fixture, tmp_path: Path
) -> None:
    x = images()
    model = calibrated(Upsampled(groups=groups), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    assert "ConvTranspose" not in operators(file)
    _, fused = run(file, x)
    assert (fused["QLinearConv"], fused["DepthToSpace"], fused["Conv"]) == (2, 1, 1)
    assert max(d.different for d in compare_qdq_onnx(file, model, x)) == 0


def test_a_clip_that_repeats_a_range_is_left_out(calibrated: Fixture, tmp_path: Path) -> None:
    x = images()
    net = nn.Sequential(
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(8, 4, 1)
    )
    model = calibrated(net, x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    assert operators(file).count("Clip") == 1
    assert max(d.different for d in compare_qdq_onnx(file, model, x)) == 0


def test_windows_that_overlap_stay_a_transposed_convolution(
    calibrated: Fixture, tmp_path: Path
) -> None:
    x = images()
    model = calibrated(Upsampled(kernel=4), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    assert "ConvTranspose" in operators(file)
    assert max(d.unexplained for d in compare_qdq_onnx(file, model, x)) == 0


class Picking(nn.Module):
    """Peaks of a heat map, as a TransFusion head picks them, and a layer on their features."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.heat = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 2, 1)
        self.out = nn.Conv1d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(x)
        heat, around = self.heat(y).sigmoid(), torch.zeros(2, 2, 12, 12)
        around[:, :, 1:-1, 1:-1] = torch.max_pool2d(heat, 3, 1)
        peaks = (heat * (heat == around)).amax(1).flatten(1)
        place = peaks.argsort(-1, descending=True)[:, None, :6].expand(-1, 16, -1)
        return self.out(y.flatten(2).gather(2, place))


def test_half_files_choose_by_float32(calibrated: Fixture, tmp_path: Path) -> None:
    """A heat map in float16 has other peaks, and others are the largest."""
    x = images() * 0.1  # scores that lie close together
    model = calibrated(Picking(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "tensorrt11")
    assert max(d.unexplained for d in compare_qdq_onnx(file, model, x)) == 0
    assert lint_onnx(file.path, "tensorrt11") == []


@EXACT
def test_openvino_makes_the_simulators_integers(calibrated: Fixture, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed")
    x = images()
    model = calibrated(Upsampled(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "openvino", integer_sums=True)
    assert lint_onnx(file.path, "openvino") == []
    found = compare_qdq_onnx(file, model, x)
    assert [d.op for d in found] == ["quantize", "conv", "conv_transpose"]
    assert max(d.unexplained for d in found) == 0


class Normed(nn.Module):
    """A norm of small integers, where ε counts."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(8, 16, 1), nn.Conv2d(8, 16, 1)
        self.norm, self.last = norm, nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.left(x) + self.right(x)))


@pytest.mark.parametrize("norm", [nn.GroupNorm(4, 16), nn.InstanceNorm2d(16)])
def test_openvinos_norms_of_integers_have_the_models_epsilon(
    calibrated: Fixture, tmp_path: Path, norm: nn.Module
) -> None:
    """OpenVINO takes an ε for the integers' variance that is meant for that of their values."""
    pytest.importorskip("openvino", reason="openvino is not installed")
    net, x = Normed(norm), torch.randn(1, 8, 8, 8) * 0.01
    for layer in net.left, net.right:
        layer.bias.data *= 0.01
    model = calibrated(net, x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "openvino")
    assert max(d.unexplained for d in compare_qdq_onnx(file, model, x)) == 0


class ReadThrice(nn.Module):
    """An average that one convolution reads quantized, and a norm and a sigmoid in float."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(8, 16, 3, padding=1), nn.AvgPool2d(2)
        self.norm = nn.BatchNorm2d(16)
        self.heads = nn.ModuleList(nn.Conv2d(16, 8, k) for k in (3, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.pool(self.stem(x))
        read = x, self.norm(x).relu(), (2 * x).sigmoid()
        return tuple(head(y) for head, y in zip(self.heads, read, strict=True))


@EXACT
def test_an_average_that_openvino_also_quantizes_stays_exact_in_float(
    calibrated: Fixture, tmp_path: Path
) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed")
    x = images()
    model = calibrated(ReadThrice(), x, exclude=("norm",))
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "openvino")
    assert operators(file).count("Max") == 1
    assert max(d.unexplained for d in compare_qdq_onnx(file, model, x)) == 0


def test_half_files_are_float32_from_pair_to_pair(calibrated: Fixture, tmp_path: Path) -> None:
    x = images()
    model = calibrated(Mixed(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "tensorrt11")
    assert lint_onnx(file.path, "tensorrt11") == []
    proto = onnx.load(file.path)
    onnx.checker.check_model(proto, full_check=True)
    typed = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    types = {v.name: v.type.tensor_type.elem_type for v in typed.graph.value_info}
    ports = (*proto.graph.input, *proto.graph.output)
    assert {port.type.tensor_type.elem_type for port in ports} == {10}
    for node in proto.graph.node:
        if node.op_type in ("Sigmoid", "ReduceMean"):
            assert types[node.output[0]] == {"Sigmoid": 10, "ReduceMean": 1}[node.op_type]
        elif node.op_type in ("Conv", "Gemm"):
            assert types.get(node.output[0], 1) == 1
    scales = {
        node.input[1] for node in proto.graph.node if node.op_type.endswith("QuantizeLinear")
    } | {node.input[1] for node in proto.graph.node if node.op_type == "DequantizeLinear"}
    held = {t.name: t for t in proto.graph.initializer}
    assert {held[name].data_type for name in scales} == {1}
    assert max(d.unexplained for d in compare_qdq_onnx(file, model, x)) == 0


def test_half_files_run_as_a_whole(calibrated: Fixture, tmp_path: Path) -> None:
    x = images()
    model = calibrated(Mixed(), x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "tensorrt11")
    session = onnxruntime.InferenceSession(file.path, providers=["CPUExecutionProvider"])
    (made,) = session.run(None, {"x": x.half().numpy()})
    assert made.dtype == np.float16
    want = simulate(model, x)(x.half().float())
    torch.testing.assert_close(torch.from_numpy(made).float(), want, rtol=0.01, atol=0.01)


def test_types_are_linted_for_version_11_alone(calibrated: Fixture, tmp_path: Path) -> None:
    x = images()
    net = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(1152, 3))
    model = calibrated(net, x)
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "tensorrt10")
    assert lint_onnx(file.path, "tensorrt10") == []
    assert {f.id for f in lint_onnx(file.path, "tensorrt11")} == {"TRT016"}
    model[0]._weight_quantizer.disable()
    model[0]._input_quantizer.disable()
    half = export_qdq_onnx(model, x, tmp_path / "half.onnx", "tensorrt11")
    assert lint_onnx(half.path, "tensorrt11") == []
    plain = export_qdq_onnx(model, x, tmp_path / "plain.onnx", "tensorrt10")
    assert {f.id for f in lint_onnx(plain.path, "tensorrt11")} == {"TRT016", "TRT017"}
    proto = onnx.load(half.path)
    gemm = next(n for n in proto.graph.node if n.op_type == "Gemm")
    pair = next(n for n in proto.graph.node if n.output[0] == gemm.input[0])
    scale = next(t for t in proto.graph.initializer if t.name == pair.input[1])
    scale.CopyFrom(
        numpy_helper.from_array(numpy_helper.to_array(scale).astype(np.float16), scale.name)
    )
    onnx.save(proto, half.path)
    assert "TRT015" in {f.id for f in lint_onnx(half.path, "tensorrt11")}


def test_a_float_file_in_halves(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1)).eval()
    x = torch.randn(2, 8)
    made = export_float_onnx(net, x, tmp_path / "net.onnx", half=True, frames=[x])
    proto = onnx.load(made.path)
    assert {t.data_type for t in proto.graph.initializer} <= {7, 10}
    session = onnxruntime.InferenceSession(made.path, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: x.half().numpy()})
    torch.testing.assert_close(torch.from_numpy(got).float(), net(x).detach(), rtol=0.01, atol=0.01)


def test_what_overflows_half_stays_float32(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    net = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()).eval()
    with torch.no_grad():
        net[0].weight[0, 0] = 1e5
    x = torch.linspace(-1, 1, 4).view(1, 4)
    made = export_float_onnx(net, x, tmp_path / "net.onnx", half=True, frames=[x])
    assert any("the constant 100000 is beyond float16" in reason for reason in made.notes)
    (got,) = open_onnx(made.path)({next(iter(made.inputs)): x}).values()
    torch.testing.assert_close(got, net(x).detach(), rtol=0.01, atol=0.01)


@EXACT
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_openvino_averages_padding_as_zeros(
    ceil_mode: bool, calibrated: Fixture, tmp_path: Path
) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed")
    pool = nn.AvgPool2d(3, 2, 1, ceil_mode=ceil_mode)
    net = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), pool, nn.Conv2d(8, 4, 1))
    model = calibrated(net, images())
    file = export_qdq_onnx(model, images(), tmp_path / "net.onnx", "openvino")
    assert [row.op for row in file.differences] == ["quantize", "conv", "avg_pool"]
    assert all(row.unexplained == 0 for row in file.differences)
