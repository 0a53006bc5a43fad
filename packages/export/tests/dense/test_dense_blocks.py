"""MXFP8 in files for ONNX Runtime, NVFP4 for TensorRT: values, scales, weights, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

from bevquant_export import (
    compare_qdq_onnx,
    export_qdq_onnx,
    lint_onnx,
    load_qdq_onnx,
    open_onnx,
)
from bevquant_export.lint import predict_layers
from bevquant_int8sim import simulate
from bevquant_qnn import PrecisionPlan, apply_precision, quantize_model
from bevquant_quantizers import calibrate, quantize_blocks

pytest.importorskip("onnxruntime")


class Net(nn.Module):
    """Two blocks, one of them short; maps and rows; a ReLU upstream of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = nn.Conv2d(3, 40, 3), nn.Conv2d(40, 64, 1), nn.Linear(64, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.stem(x).relu()).relu()
        return self.head(x.permute(0, 2, 3, 1))


def planned(net: nn.Module, x: Tensor, plan: dict[str, Any]) -> nn.Module:
    model = quantize_model(net.eval(), example_inputs=x).model
    calibrate(model, [x], method="max")
    apply_precision(model, PrecisionPlan.by_hand(model, plan))
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: Any) -> Any:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = planned(Net(), x, {"mix": "mxfp8", "head": "mxfp8"})
    path = tmp_path_factory.mktemp("blocks") / "net.onnx"
    return model, x, export_qdq_onnx(model, x, path, "onnxruntime", dynamic_batch=True)


def test_files_compute_the_models_values(made: Any) -> None:
    model, x, file = made
    assert file.opset == 21
    assert len(file.float8) == 2
    assert all(row.unexplained == 0 for row in file.differences)
    other = torch.randn(5, 3, 8, 8)
    rows = compare_qdq_onnx(file, model, other)
    assert [row.form for row in rows] == ["int8", "mxfp8", "mxfp8"]
    assert all(row.unexplained == 0 for row in rows)
    (got,) = open_onnx(file.path, "onnxruntime")({next(iter(file.inputs)): other}).values()
    wanted = simulate(model, x)(other)
    # The whole file: float32 sums of the first layer move a few values to the next number.
    apart = (got - wanted).abs()
    assert float(apart.mean()) < 1e-3 * float(wanted.abs().max())
    assert not lint_onnx(file.path, "onnxruntime")
    with pytest.raises(ValueError, match="its scale or zero point is computed"):
        load_qdq_onnx(file.path)


def test_weights_are_stored_as_numbers_and_scales(made: Any) -> None:
    model, _, file = made
    held = {t.name: t for t in onnx.load(file.path).graph.initializer}
    assert held["mix.weight"].data_type == TensorProto.FLOAT8E4M3FN
    blocks = quantize_blocks(model.mix.weight, "mxfp8", axis=1)
    numbers = numpy_helper.to_array(held["mix.weight"]).astype(np.float32)
    np.testing.assert_array_equal(numbers, blocks.numbers.numpy())
    scales = numpy_helper.to_array(held["mix.weight_scale"])
    np.testing.assert_array_equal(scales, blocks.scales.numpy())
    assert scales.shape == (64, 2, 1, 1)


def test_scales_at_powers_of_two_and_zeros(tmp_path: Path) -> None:
    torch.manual_seed(0)
    powers = torch.exp2(torch.arange(-120.0, 121.0))
    largest = torch.cat([powers, powers.nextafter(torch.tensor(0.0)), powers * 1.75, powers * 1.99])
    x = torch.rand(len(largest) + 1, 32)
    x[:-1] *= largest[:, None]
    x[:-1, 7], x[-1] = -largest, 0.0
    model = planned(nn.Sequential(nn.Linear(32, 4)), x, {"0": "mxfp8"})
    file = export_qdq_onnx(model, x, tmp_path / "net.onnx", "onnxruntime")
    (row,) = file.differences
    assert (row.form, row.elements, row.different) == ("mxfp8", x.numel(), 0)


def test_a_changed_weight_is_found(made: Any, tmp_path: Path) -> None:
    model, x, file = made
    before = file.path.read_bytes()
    proto = onnx.load_model_from_string(before)
    tensor = next(t for t in proto.graph.initializer if t.name == "mix.weight")
    codes = bytearray(tensor.raw_data)
    codes[0] ^= 0x08
    tensor.raw_data = bytes(codes)
    try:
        onnx.save(proto, file.path)
        rows = {row.path: row for row in compare_qdq_onnx(file, model, x)}
    finally:
        file.path.write_bytes(before)
    assert rows["head._input_quantizer"].is_wrong


@pytest.mark.parametrize(
    ("profile", "name", "said"),
    [
        ("tensorrt10", "mxfp8", "is mxfp8, and profile 'tensorrt10' takes fp8_e4m3"),
        ("openvino", "mxfp8", "is mxfp8, and profile 'openvino' takes no FP8"),
        ("horizon", "mxfp8", "is mxfp8, and profile 'horizon' takes no FP8"),
        ("onnxruntime", "mxfp4", "is mxfp4, and profile 'onnxruntime' takes"),
        ("onnxruntime", "nvfp4", "is nvfp4, and profile 'onnxruntime' takes"),
        ("tensorrt10", "nvfp4", "is nvfp4, and profile 'tensorrt10' takes fp8_e4m3"),
        ("tensorrt11", "mxfp8", "is mxfp8, and profile 'tensorrt11' takes fp8_e4m3 and nvfp4"),
        ("tensorrt11", "mxfp4", "is mxfp4, and profile 'tensorrt11' takes fp8_e4m3 and nvfp4"),
    ],
)
def test_other_formats_and_runtimes_are_refused(
    profile: str, name: str, said: str, tmp_path: Path
) -> None:
    x = torch.randn(2, 32)
    model = planned(nn.Sequential(nn.Linear(32, 4)), x, {"0": name})
    with pytest.raises(ValueError, match=said):
        export_qdq_onnx(model, x, tmp_path / "net.onnx", profile)
    assert not list(tmp_path.iterdir())


class Aligned(Net):
    """Channels in whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 1)
        self.mix.weight.data[:, :16] *= 1e-6  # scales below the normal numbers of E4M3
        self.mix.weight.data[3] = 0.0


@pytest.fixture(scope="module")
def fp4(tmp_path_factory: Any) -> Any:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = planned(Aligned(), x, {"mix": "nvfp4", "head": "nvfp4"})
    path = tmp_path_factory.mktemp("fp4") / "net.onnx"
    return model, export_qdq_onnx(model, x, path, "tensorrt11", dynamic_batch=True)


def test_nvfp4_files_compute_the_models_values(fp4: Any) -> None:
    model, file = fp4
    assert file.opset == 23
    assert all(row.unexplained == 0 for row in file.differences)
    # Larger values than in calibration: scales of blocks end at 448.
    rows = compare_qdq_onnx(file, model, 3 * torch.randn(5, 3, 8, 8))
    assert [row.form for row in rows] == ["int8", "nvfp4", "nvfp4"]
    assert all(row.unexplained == 0 for row in rows)
    assert not lint_onnx(file.path, "tensorrt11")
    runs = {row.name: row.runs for row in predict_layers(file.path, "tensorrt11")}
    assert (runs["mix.MatMul"], runs["head.Gemm"]) == ("fp4", "fp4")


def test_onnx_reference_computes_the_same_of_fp4(fp4: Any) -> None:
    model, file = fp4
    ml_dtypes = pytest.importorskip("ml_dtypes")
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class TRT_FP4DynamicQuantize(OpRun):
        op_domain = "trt"

        def _run(self, x: Any, t: Any, axis: int, block_size: int, scale_type: int) -> Any:
            parts = np.stack(np.split(x, x.shape[axis] // block_size, axis))
            largest = np.abs(parts).max(axis + 1, keepdims=True) / (np.float32(6) * t)
            kept = np.where(largest == 0, 1, largest.clip(2.0**-9, 448))
            scales = kept.astype(ml_dtypes.float8_e4m3fn)
            numbers = (parts / (scales.astype(np.float32) * t)).clip(-6, 6)
            joined = np.concatenate(list(numbers), axis).astype(ml_dtypes.float4_e2m1fn)
            return joined, np.concatenate(list(scales), axis)

    x = torch.randn(2, 3, 8, 8)
    evaluator = ReferenceEvaluator(str(file.path), new_ops=[TRT_FP4DynamicQuantize])
    (got,) = evaluator.run(None, {"x": x.half().numpy()})
    wanted = simulate(model, x)(x.half().float())
    assert np.abs(got - wanted.numpy()).max() < 2e-3 * float(wanted.abs().max())


def test_fp4_weights_take_four_bits(fp4: Any) -> None:
    model, file = fp4
    held = {t.name: t for t in onnx.load(file.path).graph.initializer}
    weight = model.mix.weight
    blocks = quantize_blocks(weight, "nvfp4", weight.abs().amax(), axis=1)
    assert held["mix.weight"].data_type == TensorProto.FLOAT4E2M1
    assert len(held["mix.weight"].raw_data) == weight.numel() // 2
    for name, wanted in (("", blocks.numbers), ("_scale", blocks.scales)):
        numbers = numpy_helper.to_array(held[f"mix.weight{name}"]).astype(np.float32)
        np.testing.assert_array_equal(numbers, wanted.flatten(1).numpy())
    t = numpy_helper.to_array(held["mix.weight_tensor_scale"])
    assert float(t) == float(blocks.tensor_scale)


def test_a_changed_fp4_weight_is_found(fp4: Any) -> None:
    model, file = fp4
    before = file.path.read_bytes()
    proto = onnx.load_model_from_string(before)
    tensor = next(t for t in proto.graph.initializer if t.name == "mix.weight")
    codes = np.frombuffer(tensor.raw_data, np.uint8)
    tensor.raw_data = (codes ^ 0x08).tobytes()
    try:
        onnx.save(proto, file.path)
        rows = {row.path: row for row in compare_qdq_onnx(file, model, torch.randn(2, 3, 8, 8))}
    finally:
        file.path.write_bytes(before)
    assert rows["head._input_quantizer"].is_wrong


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.Conv2d(40, 4, 1), "has 40 channels: TensorRT takes multiples of 16"),
        (nn.Conv2d(32, 4, 1, stride=2), "expected a convolution of stride 1 without padding"),
        (nn.Conv2d(32, 4, 1, padding=1), "expected a convolution of stride 1 without padding"),
    ],
)
def test_fp4_layers_that_are_no_product_are_refused(
    layer: nn.Conv2d, said: str, tmp_path: Path
) -> None:
    x = torch.randn(2, layer.in_channels, 4, 4)
    model = planned(nn.Sequential(layer), x, {"0": "nvfp4"})
    with pytest.raises(ValueError, match=said):
        export_qdq_onnx(model, x, tmp_path / "net.onnx", "tensorrt11")
    assert not list(tmp_path.iterdir())
