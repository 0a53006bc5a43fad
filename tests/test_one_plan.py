"""One plan says who runs at which precision; simulation and every exporter obey it or refuse."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from bevquant_export import export_qdq_onnx, export_sparse_onnx
from bevquant_int8sim import simulate
from bevquant_qnn import PrecisionPlan, apply_precision, precision_groups, quantize_model
from bevquant_quantizers import calibrate
from bevquant_sparse import to_dense

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    spconv = pytest.importorskip("spconv.pytorch", reason="spconv is not installed")
onnx = pytest.importorskip("onnx", reason="onnx is not installed")

PROFILES = ("tensorrt", "onnxruntime", "horizon")
fx.wrap("to_dense")


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = []
        for i, channels in enumerate((5, 8, 8, 8)):
            layers += [spconv.SubMConv3d(channels, 8, 3, padding=1, indice_key="k"), nn.ReLU()]
            self.width = 8 + i
        self.layers = spconv.SparseSequential(*layers)

    def forward(self, features: torch.Tensor, coords: torch.Tensor, batch_size: int) -> object:
        x = self.layers(spconv.SparseConvTensor(features, coords, [12, 10, 8], batch_size))
        return to_dense(x.features, x.indices, x.spatial_shape, x.batch_size)


def dense() -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential()
    for channels in (3, 8, 8, 8):
        net.extend([nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU()])
    images = torch.randn(2, 3, 12, 12)
    model = quantize_model(net.eval(), example_inputs=images).model
    calibrate(model, [images])
    return model, images


def sparse() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor, int]]:
    coords = (torch.rand(1, 12, 10, 8) < 0.2).nonzero().int().contiguous()
    frame = (torch.randn(len(coords), 5), coords, 1)
    model = quantize_model(Sparse().eval(), example_inputs=frame).model
    calibrate(model, [frame])
    return model, frame


def through_a_file(model: nn.Module, plan: PrecisionPlan, folder: Path) -> None:
    """Apply the plan as the next process would: read from its file."""
    plan.save(folder / "plan.json")
    apply_precision(model, PrecisionPlan.load(folder / "plan.json"))


def sqnr(exact: torch.Tensor, other: torch.Tensor) -> float:
    noise = (exact - other).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise))


def test_simulation_runs_what_the_plan_says(tmp_path: Path) -> None:
    model, images = dense()
    plan = PrecisionPlan.by_hand(model, {"2": "int16", "4": "float", "6": "int4"})
    through_a_file(model, plan, tmp_path)
    integers = simulate(model, images)
    assert {fallback.path for fallback in integers.float_fallbacks} == {"4"}
    convs = {step.path: step for step in integers.steps if step.op == "conv"}
    assert set(convs) == {"0", "2", "6"}
    bits = {path: integers.program.values[step.inputs[0]].form.bits for path, step in convs.items()}
    assert bits == {"0": 8, "2": 16, "6": 8}
    (weight,) = (t for n, t in convs["6"].tensors.items() if n == "weight")
    assert int(weight.abs().max()) == 7
    with torch.no_grad():
        assert sqnr(model(images), integers(images)) > 40


def test_sparse_simulation_runs_what_the_plan_says(tmp_path: Path) -> None:
    model, frame = sparse()
    plan = PrecisionPlan.by_hand(model, {"layers.2": "int16", "layers.4": "float"})
    through_a_file(model, plan, tmp_path)
    integers = simulate(model, frame)
    assert {fallback.path for fallback in integers.float_fallbacks} == {"layers.4"}
    with torch.no_grad():
        assert sqnr(model(*frame), integers(*frame)) > 40


@pytest.mark.parametrize("profile", PROFILES)
def test_dense_files_hold_the_plan_or_are_not_written(profile: str, tmp_path: Path) -> None:
    model, images = dense()
    path = tmp_path / "model.onnx"
    through_a_file(model, PrecisionPlan.by_hand(model, {"2": "int4"}), tmp_path)
    export_qdq_onnx(model, (images,), path, profile=profile)
    graph = onnx.load(path).graph
    assert [node.op_type for node in graph.node].count("Conv") == 4
    path.unlink()
    apply_precision(model, PrecisionPlan.by_hand(model, {"2": "int16"}))
    if profile == "onnxruntime":
        export_qdq_onnx(model, (images,), path, profile=profile)
        kinds = {constant.data_type for constant in onnx.load(path).graph.initializer}
        assert onnx.TensorProto.INT16 in kinds
        return
    # Other profiles have no 16-bit activations: refused, not narrowed to 8.
    with pytest.raises(ValueError, match="16 bits; expected 8"):
        export_qdq_onnx(model, (images,), path, profile=profile)
    assert not path.exists()


@pytest.mark.parametrize("profile", PROFILES)
def test_a_float_layer_is_never_written_as_integers(profile: str, tmp_path: Path) -> None:
    model, images = dense()
    through_a_file(model, PrecisionPlan.by_hand(model, {"4": "float"}), tmp_path)
    path = tmp_path / "model.onnx"
    export_qdq_onnx(model, (images,), path, profile=profile)
    graph = onnx.load(path).graph
    made = {output: node.op_type for node in graph.node for output in node.output}
    convs = [node for node in graph.node if node.op_type == "Conv"]
    quantized = [made.get(node.input[1]) == "DequantizeLinear" for node in convs]
    assert quantized == [True, True, False, True]


def test_sparse_files_hold_the_plan_or_are_not_written(tmp_path: Path) -> None:
    model, frame = sparse()
    path = tmp_path / "model.onnx"
    through_a_file(model, PrecisionPlan.by_hand(model, {"layers.4": "float"}), tmp_path)
    written = export_sparse_onnx(model, frame, path)
    forms = [layer.precision for layer in written.layers if "conv" in layer.name]
    assert forms == ["int8", "int8", "fp16", "int8"]
    path.unlink()
    apply_precision(model, PrecisionPlan.by_hand(model, {"layers.4": "int16"}))
    with pytest.raises(ValueError, match="16 bits"):
        export_sparse_onnx(model, frame, path)
    assert not path.exists()


def test_calibration_after_the_plan_leaves_float_layers_alone(tmp_path: Path) -> None:
    model, images = dense()
    through_a_file(model, PrecisionPlan.by_hand(model, {"4": "float"}), tmp_path)
    report = calibrate(model, [images * 2])
    calibrated = {name for row in report.quantizers for name in row.names}
    (group,) = (group for group in precision_groups(model) if group.name == "4")
    assert group.quantizers[0].name not in calibrated
    assert "0._input_quantizer" in calibrated
