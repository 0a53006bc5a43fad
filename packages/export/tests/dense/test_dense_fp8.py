"""FP8 in QDQ files: nodes, values in ONNX Runtime and ONNX's reference, refusals, the linter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from bevquant_export import compare_qdq_onnx, export_qdq_onnx, export_sparse_onnx, lint_onnx
from bevquant_export.dense.nodes._weighted import rounds_within
from bevquant_export.lint import predict_layers
from bevquant_int8sim import simulate
from bevquant_int8sim.program import float8_round
from bevquant_qnn import PrecisionPlan, QuantConfig, apply_precision, quantize_model
from bevquant_quantizers import calibrate

TYPES = {(4, 3): TensorProto.FLOAT8E4M3FN, (5, 2): TensorProto.FLOAT8E5M2}


class Net(nn.Module):
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
        x = nn.functional.max_pool2d(self.up(x).relu(), 2)
        x = self.last(x.clamp(-0.5, 2.0)).relu()
        return self.head(x.permute(0, 2, 3, 1))


def calibrated(
    plan: dict[str, Any] | None = None, default: Any = "int8", **settings: Any
) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8)
    model = quantize_model(Net().eval(), QuantConfig(**settings), images).model
    calibrate(model, [images], method="mse")
    if plan is not None:
        apply_precision(model, PrecisionPlan.by_hand(model, plan, default))
    return model, images


def weights(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    graph = onnx.load(path).graph
    return {t.name: numpy_helper.to_array(t) for t in graph.initializer}


@pytest.mark.parametrize("bits", [(4, 3), (5, 2)])
def test_files_hold_fp8_and_compute_the_models_values(bits: Any, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    model, images = calibrated(num_bits=bits)
    file = export_qdq_onnx(model, images, tmp_path / "net.onnx", "onnxruntime")
    assert file.opset == 19
    assert file.verified.startswith("onnxruntime")
    assert len(file.float8) == 6  # five inputs and the residual
    assert not file.integers
    kinds = {t.name: t.data_type for t in onnx.load(file.path).graph.initializer}
    stored = [f"{path}.weight" for path in ("first", "second", "up", "last", "head")]
    assert {kinds[name] for name in stored} == {TYPES[bits]}
    assert "in another order" in str(file)
    # All optimisations of the runtime, on other inputs: its values are the simulator's, but for
    # what float32 sums move over a rounding border.
    x = torch.randn(2, 3, 8, 8)
    assert all(row.unexplained == 0 for row in compare_qdq_onnx(file, model, x))
    session = ort.InferenceSession(file.path, providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, {"input" if "input" in file.inputs else "x": x.numpy()})
    mine = simulate(model, images)(x).numpy()
    assert np.abs(theirs - mine).max() < 0.1 * np.abs(mine).max()
    assert np.mean(np.abs(theirs - mine)) < 0.005 * np.abs(mine).max()


def test_stored_weights_are_the_simulators(tmp_path: Path) -> None:
    model, images = calibrated(num_bits=(4, 3))
    file = export_qdq_onnx(model, images, tmp_path / "net.onnx", "onnxruntime", verify=False)
    held = weights(file.path)
    for step in simulate(model, images).steps:
        if not hasattr(step.target, "weight_scale"):
            continue
        layer = step.target
        np.testing.assert_array_equal(
            held[f"{step.path}.weight"].astype(np.float32), layer.weight.float().numpy()
        )
        np.testing.assert_array_equal(held[f"{step.path}.weight_scale"], layer.weight_scale)
        scale = held[f"{step.path}._input_quantizer.scale"]
        assert float(scale) == layer.input_scale


@pytest.mark.parametrize("profile", ["tensorrt10", "tensorrt11"])
def test_files_for_tensorrt_run_as_written(profile: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, images = calibrated(num_bits=(4, 3), weight_per_channel=False)
    file = export_qdq_onnx(model, images, tmp_path / "net.onnx", profile)
    assert file.opset == 19
    assert all(row.unexplained == 0 for row in file.differences)
    assert not lint_onnx(file.path, profile)
    found = {layer.name: layer for layer in predict_layers(file.path, profile)}
    assert found["first.Conv"].runs == "fp8"
    assert found["first.Relu"].into == "first.Conv"
    assert found["up.ConvTranspose"].runs == "fp8"


def test_scales_per_channel_for_tensorrt_are_named(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, images = calibrated(num_bits=(4, 3))
    file = export_qdq_onnx(model, images, tmp_path / "net.onnx", "tensorrt11")
    assert any("transposed convolution" in note for note in file.notes)
    assert {finding.id for finding in lint_onnx(file.path, "tensorrt11")} == {"TRT021"}
    found = {layer.name: layer for layer in predict_layers(file.path, "tensorrt11")}
    assert "scale per channel" in found["first.Conv"].reason


def test_onnxs_reference_computes_the_same(tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    torch.manual_seed(0)
    images = torch.randn(4, 6)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    model = quantize_model(net, QuantConfig(num_bits=(4, 3)), images).model
    calibrate(model, [images])
    file = export_qdq_onnx(model, images, tmp_path / "net.onnx", "tensorrt10", verify=False)
    (theirs,) = ReferenceEvaluator(onnx.load(file.path)).run(None, {"input": images.numpy()})
    mine = simulate(model, images)(images)
    np.testing.assert_allclose(theirs, mine.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("profile", ["onnxruntime", "tensorrt10"])
def test_formats_mix_by_layer(profile: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, images = calibrated({"second": "int8", "head": "float"}, "fp8")
    file = export_qdq_onnx(model, images, tmp_path / "net.onnx", profile)
    assert file.integers
    assert file.float8
    assert all(not row.is_wrong for row in file.differences)
    kinds = {t.data_type for t in onnx.load(file.path).graph.initializer}
    assert TensorProto.FLOAT8E4M3FN in kinds


def test_a_changed_weight_is_found(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model, images = calibrated(num_bits=(4, 3))
    file = export_qdq_onnx(model, images, tmp_path / "net.onnx", "onnxruntime")
    proto = onnx.load(file.path)
    tensor = next(t for t in proto.graph.initializer if t.name == "first.weight")
    codes = bytearray(tensor.raw_data)
    codes[0] ^= 0x08
    tensor.raw_data = bytes(codes)
    onnx.save(proto, file.path)
    rows = {row.path: row for row in compare_qdq_onnx(file, model, images)}
    assert rows["second._input_quantizer"].is_wrong


def test_ties_are_told_by_the_rounding_of_both_ends() -> None:
    model, images = calibrated(num_bits=(4, 3))
    step = next(s for s in simulate(model, images).steps if s.target is float8_round)
    step = replace(step, args=(step.args[0], 1.0, "fp8_e4m3"))
    border = np.float32([17.0, 17.0, 17.01, 2.0])
    got = np.float32([16.0, 18.0, 16.0, 2.25])
    within = rounds_within(step, border, np.float32([1e-3, 1e-3, 1e-3, 1e-3]), got)
    assert within.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("profile", "bits", "said"),
    [
        ("tensorrt10", (5, 2), r"takes fp8_e4m3: quantize it with num_bits=\(4, 3\)"),
        ("openvino", (4, 3), "takes no FP8: quantize it with num_bits=8"),
        ("horizon", (4, 3), "takes no FP8: quantize it with num_bits=8"),
    ],
)
def test_formats_that_a_runtime_lacks_are_refused(
    profile: str, bits: Any, said: str, tmp_path: Path
) -> None:
    model, images = calibrated(num_bits=bits)
    with pytest.raises(ValueError, match=said):
        export_qdq_onnx(model, images, tmp_path / "net.onnx", profile)
    assert not list(tmp_path.iterdir())


def _pair(before: str, kind: int, opset: int, path: Path) -> Path:
    nodes = [
        helper.make_node(before, ["x"], ["r"], name="before"),
        helper.make_node("QuantizeLinear", ["r", "s", "z"], ["q"], name="q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], name="dq"),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", 1, [4])],
        [helper.make_tensor_value_info("y", 1, [4])],
        [helper.make_tensor("s", 1, [], [1.0]), helper.make_tensor("z", kind, [], b"\0", raw=True)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.save(model, path)
    return path


E4M3, E5M2 = TYPES.values()


@pytest.mark.parametrize(
    ("target", "before", "kind", "opset", "rules"),
    [
        ("tensorrt10", "Sigmoid", E4M3, 19, set()),
        ("tensorrt10", "Sigmoid", E5M2, 19, {"TRT020"}),
        ("tensorrt10", "Sigmoid", E4M3, 18, {"QDQ005"}),
        ("onnxruntime", "Sigmoid", E5M2, 19, set()),
        ("onnxruntime", "Relu", E4M3, 19, {"ORT009"}),
        ("openvino", "Sigmoid", E4M3, 19, {"QDQ006"}),
    ],
)
def test_the_linter_knows_fp8(
    target: str, before: str, kind: int, opset: int, rules: set[str], tmp_path: Path
) -> None:
    path = _pair(before, kind, opset, tmp_path / "net.onnx")
    found = {f.id for f in lint_onnx(path, target) if f.id[:3] in ("TRT", "QDQ", "ORT")}
    assert found == rules


def test_onnxruntime_drops_a_relu_that_the_linter_names(tmp_path: Path) -> None:
    """Where a later version does not, ORT009 and the Max of the exporter may go."""
    ort = pytest.importorskip("onnxruntime")
    path = _pair("Relu", E4M3, 19, tmp_path / "net.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    x = np.float32([-3, -0.5, 2, 999])
    plain = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    assert plain.run(None, {"x": x})[0].tolist() == [0, 0, 2, 448]


def test_layers_over_voxels_are_written_with_float_weights(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    spconv = pytest.importorskip("spconv.pytorch")

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = spconv.SubMConv3d(4, 6, 3, indice_key="a")
            self.head = nn.Linear(6, 2)

        def forward(self, features: Tensor, indices: Tensor) -> Tensor:
            x = self.conv(spconv.SparseConvTensor(features, indices, [4, 4, 4], 1))
            return self.head(x.features)

    torch.manual_seed(0)
    cells = (torch.rand(1, 4, 4, 4) < 0.4).nonzero().int()
    given = (torch.randn(len(cells), 4), cells)
    model = quantize_model(Sparse().eval(), QuantConfig(num_bits=(4, 3)), given).model
    calibrate(model, [given])
    file = export_qdq_onnx(model, given, tmp_path / "net.onnx", "onnxruntime")
    assert len(file.float8) == 2
    assert all(row.unexplained == 0 for row in file.differences)
    for dialect in ("libspconv", "portable"):
        with pytest.raises(ValueError, match="takes no FP8: quantize it with num_bits=8"):
            export_sparse_onnx(model, given, tmp_path / "sparse.onnx", dialect=dialect)
