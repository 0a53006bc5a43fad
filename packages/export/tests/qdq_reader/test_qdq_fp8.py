"""FP8 files of this project, of ONNX Runtime's quantizer, and node by node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
from torch import Tensor, nn

from bevquant_export import (
    export_float_onnx,
    export_qdq_onnx,
    float_qdq_model,
    load_qdq_onnx,
)
from bevquant_int8sim import IntegerModel, compare, simulate
from bevquant_int8sim.program import Float8Layer
from bevquant_qnn import PrecisionPlan, QuantConfig, apply_precision, quantize_model
from bevquant_quantizers import calibrate

from .qdq_graphs import Graph, run_file
from .test_qdq_files import Frames

ml_dtypes = pytest.importorskip("ml_dtypes")

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
IMAGE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
F32 = np.float32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.last = nn.Conv2d(6, 6, 1)
        self.head = nn.Linear(6, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image).relu()
        x = nn.functional.relu6(x + self.second(x))
        x = self.last(nn.functional.max_pool2d(self.up(x).relu(), 2)).relu()
        return self.head(x.permute(0, 2, 3, 1))


def layers(model: IntegerModel) -> int:
    return sum(isinstance(step.target, Float8Layer) for step in model.steps)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("profile", "bits"), [("onnxruntime", (4, 3)), ("onnxruntime", (5, 2)), ("tensorrt10", (4, 3))]
)
def test_files_of_our_own_give_their_model_back(profile: str, bits: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = quantize_model(Net().eval(), QuantConfig(num_bits=bits), IMAGE).model
    calibrate(model, [IMAGE], method="max")
    file = export_qdq_onnx(model, IMAGE, tmp_path / "net.onnx", profile, verify=False)
    wanted, got = simulate(model, IMAGE), load_qdq_onnx(file.path)
    # Transposed convolutions have one scale for TensorRT, or float weights.
    assert layers(got) == (5 if profile == "onnxruntime" else 4)
    for x in (IMAGE, 3 * torch.randn(IMAGE.shape)):
        assert torch.equal(got(x), wanted(x))
    assert not compare(float_qdq_model(got), got, [IMAGE]).wrong
    got.save(tmp_path / "saved")
    assert torch.equal(IntegerModel.load(tmp_path / "saved")(IMAGE), wanted(IMAGE))


def test_files_of_several_formats_give_their_model_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = quantize_model(Net().eval(), example_inputs=IMAGE).model
    calibrate(model, [IMAGE], method="max")
    apply_precision(model, PrecisionPlan.by_hand(model, {"second": "fp8", "head": "int16"}))
    file = export_qdq_onnx(model, IMAGE, tmp_path / "net.onnx", "onnxruntime")
    got, wanted = load_qdq_onnx(file.path), simulate(model, IMAGE)(IMAGE)
    assert layers(got) == 1
    assert {"conv", "linear"} <= {step.op for step in got.steps}
    torch.testing.assert_close(got(IMAGE), wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("per_channel", [False, True])
def test_static_quantization_by_onnxruntime(per_channel: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU6(),
                        nn.Flatten(), nn.Linear(288, 5)).eval()  # fmt: skip
    source, path = tmp_path / "float.onnx", tmp_path / "quantized.onnx"
    (name,) = export_float_onnx(net, IMAGE, source).inputs

    def quantize(**options: Any) -> None:
        quantize_static(
            source, path, Frames(name), quant_format=QuantFormat.QDQ, per_channel=per_channel,
            activation_type=QuantType.QFLOAT8E4M3FN, weight_type=QuantType.QFLOAT8E4M3FN,
            calibrate_method=CalibrationMethod.Distribution, extra_options=options,
        )  # fmt: skip

    quantize(QDQKeepRemovableActivations=True)
    model = load_qdq_onnx(path, float_file=source)
    assert layers(model) == 3
    assert np.array_equal(model(IMAGE).numpy(), run_file(path, {name: IMAGE.numpy()})[0])
    assert not compare(float_qdq_model(model), model, [IMAGE]).wrong
    # By default ReLUs are left out, which the signed numbers of FP8 do not stand for.
    quantize()
    with pytest.raises(ValueError, match=r"the Relu of the float file .*KeepRemovableActivations"):
        load_qdq_onnx(path, float_file=source)
    assert np.array_equal(
        load_qdq_onnx(path)(IMAGE).numpy(), run_file(path, {name: IMAGE.numpy()})[0]
    )


def test_formats_of_input_and_weight_and_mixtures_that_run_in_float(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers, scale = rng.normal(0, 40, (6, 12)), rng.uniform(0.01, 0.1, 6).astype(F32)
    graph = Graph()
    narrow, wide, eight = (graph.pair("x", 0.03, 0, kind) for kind in (E4M3, E5M2, "int8"))
    w = graph.stored("w", numbers, scale, 0, E4M3, axis=0)
    v = graph.stored("v", numbers, scale, 0, "int8", axis=0)
    blocks = graph.stored("u", numbers, np.full((6, 3), 0.1, F32), np.zeros((6, 3)), E4M3, axis=1,
                          block_size=4)  # fmt: skip
    names = [
        graph.node("Gemm", [x, weight], transB=1)
        for x, weight in (
            (narrow, w),
            (wide, w),
            (eight, w),
            (narrow, v),
            ("x", w),
            (narrow, blocks),
        )
    ]
    path = graph.save(tmp_path / "net.onnx", {"x": [5, 12]}, names)
    x = rng.normal(0, 4, (5, 12)).astype(F32)
    model = load_qdq_onnx(path)
    assert layers(model) == 2
    assert len(model.float_fallbacks) == 4
    for got, wanted in zip(model(torch.from_numpy(x)), run_file(path, {"x": x}), strict=True):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_all_codes_ties_and_saturation_are_onnxruntimes(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8)
    for kind in (E4M3, E5M2):
        numbers = codes.view(kind).astype(F32)
        numbers = np.sort(numbers[np.isfinite(numbers)])
        middle = (numbers[1:] + numbers[:-1]) / 2
        x = np.concatenate(
            [numbers, middle, np.nextafter(middle, F32(np.inf)), [1e9, -np.inf, np.nan]]
        )
        x = (x * F32(0.37)).astype(F32)[None]
        graph = Graph()
        path = graph.save(
            tmp_path / f"{kind}.onnx", {"x": list(x.shape)}, [graph.pair("x", 0.37, 0, kind)]
        )
        (wanted,) = run_file(path, {"x": x})
        got = load_qdq_onnx(path, (torch.zeros(x.shape),))(torch.from_numpy(x)).numpy()
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        (E4M3, {"saturate": 0}, "saturate=0 makes NaN of large values; expected saturate=1"),
        ("float8_e4m3fnuz", {}, "its numbers are float8_e4m3fnuz; expected"),
    ],
)
def test_other_numbers_are_refused(kind: str, more: Any, said: str, tmp_path: Path) -> None:
    graph = Graph()
    both = graph.parameters("x", 0.5, 0, kind)
    q = graph.node("QuantizeLinear", ["x", *both], **more)
    y = graph.node("DequantizeLinear", [q, *both])
    with pytest.raises(ValueError, match=f"QuantizeLinear_0 .*{said}"):
        load_qdq_onnx(graph.save(tmp_path / "net.onnx", {"x": [4]}, [y]))


def test_fp8_at_the_inputs_and_outputs(tmp_path: Path) -> None:
    graph = Graph()
    x = graph.node("DequantizeLinear", ["x", *graph.parameters("x", 0.5, 0, E4M3)])
    y = graph.node("Relu", [x])
    q = graph.node("QuantizeLinear", [y, *graph.parameters("y", 0.25, 0, E5M2)])
    port = helper.make_tensor_value_info("x", TensorProto.FLOAT8E4M3FN, [4])
    path = graph.save(tmp_path / "net.onnx", {"x": port}, [q])
    given = torch.tensor([-3.0, 0.5, 17.0, 448.0]).to(torch.float8_e4m3fn)
    made = load_qdq_onnx(path, (given,))(given)
    assert made.dtype == torch.float8_e5m2
    assert made.float().tolist() == [0.0, 1.0, 32.0, 896.0]
