"""The documented hybrid model: names, pairs and settings of its file for hb_mapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_hybrid.quantization import (
    DeQuantStub,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat_fx,
)

Fixture = Callable[..., Any]
PAIR = ["Constant", "Constant", "QuantizeLinear", "DequantizeLinear"]


class Selu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.selu(x)


class ConvReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 3, 1), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.conv(x))


def conv_bn_relu() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())


class HybridModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer0, self.layer1, self.layer2 = conv_bn_relu(), ConvReLU(), conv_bn_relu()
        self.selu = Selu()
        self.conv0, self.conv1 = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.dequant = DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.selu(self.layer0(self.selu(x))))
        return self.dequant(self.selu(self.conv1(self.conv0(self.layer2(x)))))


@pytest.fixture
def qat() -> nn.Module:
    on_cpu = {"module_name": ["layer1.conv", "conv0"], "module_type": [Selu]}
    hybrid = {"hybrid": True, "hybrid_dict": on_cpu}
    calibration = prepare_calibration_fx(
        HybridModel(), {"": get_default_calib_qconfig()}, **hybrid
    ).eval()
    for _ in range(3):
        calibration(torch.rand(1, 3, 16, 16))
    out = [("conv1", get_default_qat_out_qconfig())]
    return prepare_qat_fx(
        calibration, {"": get_default_qat_qconfig(), "module_name": out}, **hybrid
    )


def test_nodes_are_numbered_as_documented(qat: nn.Module, found: Fixture) -> None:
    import onnx

    file, counted, lint = found(qat, torch.rand(1, 3, 16, 16), "horizon")
    graph = onnx.load(file.path).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds == [
        "Selu", *PAIR, *PAIR, "Conv", "Relu", *PAIR,  # quantized behind the CPU; layer0
        "Selu", "Conv", "Relu", *PAIR,  # layer1 on the CPU
        *PAIR, "Conv", "Relu", *PAIR, "Conv", *PAIR,  # layer2; conv0 on the CPU
        *PAIR, "Conv", "Selu",  # conv1 with 32 bits
    ]  # fmt: skip
    assert [n.name for n in graph.node] == [f"{kind}_{i}" for i, kind in enumerate(kinds)]
    (conv0,) = [node for node in graph.node if "conv0.weight" in node.input]
    assert conv0.name == "Conv_32"
    assert file.run_on_cpu == ("Conv_32",)
    assert '  run_on_cpu: "Conv_32"\n' in file.settings.read_text()
    assert lint == set()
    assert {op: largest for op, (_, _, largest) in counted.items()} == {"quantize": 0, "conv": 0}


def test_scales_are_the_models(qat: nn.Module, found: Fixture) -> None:
    import onnx

    file, _, _ = found(qat, torch.rand(1, 3, 16, 16), "horizon")
    graph = onnx.load(file.path).graph
    values = {
        node.output[0]: torch.tensor(onnx.numpy_helper.to_array(node.attribute[0].t))
        for node in graph.node
        if node.op_type == "Constant"
    }
    scales = [values[node.input[1]] for node in graph.node if node.op_type == "QuantizeLinear"]
    assert sorted(map(len, scales)) == [1, 1, 1, 1, 1, 3, 3, 3]
    assert torch.equal(scales[0], _scale(qat, "selu_activation_post_process"))
    assert torch.equal(scales[1], qat.get_submodule("layer0.0.weight_fake_quant").scale)
    assert torch.equal(scales[2], _scale(qat, "layer0.0"))


def _scale(model: nn.Module, path: str) -> Tensor:
    found: Any = model.get_submodule(f"{path}.activation_post_process")
    return found.scale


@pytest.mark.parametrize("profile", ["tensorrt", "onnxruntime"])
def test_other_files_are_named_after_modules(profile: str, qat: nn.Module, found: Fixture) -> None:
    import onnx

    file, counted, lint = found(qat, torch.rand(1, 3, 16, 16), profile)
    names = [node.name for node in onnx.load(file.path).graph.node]
    assert len(set(names)) == len(names)
    for name in ("selu.Selu", "layer0.0.Conv", "layer1.conv.Conv", "conv0.Conv", "conv1.Conv"):
        assert name in names
    assert file.run_on_cpu == ()
    assert lint == set()
    assert all(largest <= 1 for _, _, largest in counted.values())
    assert [line.rpartition(": ")[0] for line in file.floats] == [
        "selu: selu", "layer1.conv: Conv2d", "layer1.conv: relu", "conv0: Conv2d",
    ]  # fmt: skip
