"""MXFP8 in files for ONNX Runtime: values, scales, weights, refusals."""

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
