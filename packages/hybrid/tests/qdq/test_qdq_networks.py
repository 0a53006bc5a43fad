"""Whole networks: what fuses, and the integers of the model that trains quantized."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.qat_mode import set_qat_mode
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    fuse_modules,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_calibration,
    prepare_calibration_fx,
    prepare_qat,
)

Fixture = Callable[..., Any]
PROFILES = ("tensorrt", "onnxruntime", "horizon")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + x)


class Inverted(nn.Module):
    """A block of MobileNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        wide = 2 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.ReLU6(), nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return x + y if self.adds else y


def residual_net() -> list[nn.Module]:
    return [nn.Conv2d(3, 8, 1), nn.ReLU(), Residual(), Residual(), nn.Conv2d(8, 4, 1)]


def mobile_net() -> list[nn.Module]:
    return [
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), Inverted(8, 8),
        Inverted(8, 12, 2), Inverted(12, 12), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(12, 5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "convolutions", "sums"), [(residual_net, 6, 2), (mobile_net, 10, 2)]
)
def test_onnxruntime_runs_every_layer_in_integers(
    parts: Any, convolutions: int, sums: int,
    between: Fixture, prepared: Fixture, found: Fixture, operators: Fixture,
) -> None:  # fmt: skip
    x = torch.randn(2, 3, 16, 16)
    qat = prepared(between(*parts()), x)
    file, counted, lint = found(qat, x, "onnxruntime")
    made = operators(file)
    # A fused addition adds to sums that are not quantized: its convolution runs in float.
    assert (made["QLinearConv"], made["FusedConv"]) == (convolutions - sums, sums)
    assert lint == set()
    assert counted["quantize"][0] == 0
    for different, elements, largest in counted.values():
        assert largest <= 1
        assert different <= 1 + 0.005 * elements  # biases are whole steps of the sums there
    file, counted, _ = found(qat, x, "onnxruntime", integer_sums=True)
    made = operators(file)
    assert (made["QLinearConv"], made["QLinearAdd"]) == (convolutions, sums)
    assert not {"Conv", "FusedConv", "Add", "Relu"} & set(made)  # Clip is on integers
    assert counted["add"][2] == 1


@pytest.mark.parametrize("profile", ["tensorrt", "horizon"])
@pytest.mark.parametrize("parts", [residual_net, mobile_net])
def test_other_files_make_the_models_integers(
    parts: Any, profile: str, between: Fixture, prepared: Fixture, found: Fixture
) -> None:
    x = torch.randn(2, 3, 16, 16)
    _, counted, lint = found(prepared(between(*parts()), x), x, profile)
    assert lint == set()
    for different, elements, largest in counted.values():
        assert largest <= 1
        assert different <= 1e-3 * elements  # sums in another order, beside a tie


@pytest.fixture(scope="module")
def with_batch_norms(between: Fixture, prepared: Fixture) -> Fixture:
    """A network whose batch norms trained on, and its input, for each mode once."""

    @functools.cache
    def make(mode: str) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        set_qat_mode(mode)
        x = torch.randn(2, 3, 16, 16)
        net = between(*mobile_net())
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.data[::3] *= -1  # the weight's integers change their sign
                module.weight.data[1] = 0
        return prepared(net, x), x

    return make


@pytest.mark.parametrize("mode", ["with_bn", "with_bn_reverse_fold"])
@pytest.mark.parametrize("profile", PROFILES)
def test_batch_norms_that_trained_on_are_folded(
    mode: str, profile: str, with_batch_norms: Fixture, found: Fixture
) -> None:
    import onnx

    qat, x = with_batch_norms(mode)
    set_qat_mode(mode)
    file, counted, lint = found(qat, x, profile)
    kinds = {node.op_type for node in onnx.load(file.path).graph.node}
    assert "BatchNormalization" not in kinds
    assert lint == set()
    for different, elements, largest in counted.values():
        assert largest <= 1
        assert different <= 0.02 * elements  # −(−128) is 127


@pytest.mark.parametrize("profile", PROFILES)
def test_a_calibrated_model_has_the_scales_that_it_found(
    profile: str, between: Fixture, found: Fixture
) -> None:
    import onnx

    x = torch.randn(2, 3, 16, 16)
    calibrated = prepare_calibration_fx(
        between(*mobile_net()), {"": get_default_calib_qconfig()}
    ).eval()
    calibrated(x)
    file, counted, lint = found(calibrated, x, profile)
    assert lint == set()
    assert all(largest <= 1 for _, _, largest in counted.values())
    quantizer = calibrated.get_submodule("quant.activation_post_process")
    scale = quantizer.calculate_qparams()[0]
    graph = onnx.load(file.path).graph
    constants = {c.name: c for c in graph.initializer}
    constants |= {n.output[0]: n.attribute[0].t for n in graph.node if n.op_type == "Constant"}
    first = next(node for node in graph.node if node.op_type == "QuantizeLinear")
    written = torch.tensor(onnx.numpy_helper.to_array(constants[first.input[1]]))
    assert torch.equal(written.reshape(1), scale)


class Eager(nn.Module):
    """A forward of modules alone, as eager models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()
        self.second, self.bn = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.sum, self.both = FloatFunctional(), FloatFunctional()
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(self.quant(x)))
        y = self.bn(self.sum.add(self.second(x), x))
        return self.dequant(self.head(self.both.cat([x, y], 1).permute(0, 2, 3, 1)))


@functools.cache
def eager(calibrates: bool, fused: bool) -> tuple[nn.Module, Tensor]:
    """An eager model that has seen its input."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model: nn.Module = Eager().eval()
    if fused:
        model = fuse_modules(model, [["first", "relu"], ["second", "sum"]])
    model.qconfig = get_default_calib_qconfig() if calibrates else get_default_qat_qconfig()
    made = (prepare_calibration if calibrates else prepare_qat)(model).eval()
    made(x)
    return made, x


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("calibrates", [False, True])
def test_eager_models_that_trace(
    calibrates: bool, fused: bool, profile: str, found: Fixture
) -> None:
    made, x = eager(calibrates, fused)
    file, counted, lint = found(made, x, profile)
    # Unfused, the sum has another scale at each input, and a ReLU reads what a layer quantized.
    assert lint <= ({"TRT012", "TRT014"} if profile == "tensorrt" and not fused else set())
    assert set(file.integers.values())
    for different, elements, largest in counted.values():
        assert largest <= 1
        assert different <= 0.005 * elements


def test_a_free_batch_runs_at_any_size(
    between: Fixture, prepared: Fixture, export: Any, tmp_path: Any
) -> None:
    import onnxruntime

    x = torch.randn(2, 3, 16, 16)
    qat = prepared(between(*mobile_net()), x)
    file = export.export_qdq_onnx(qat, x, tmp_path / "net.onnx", dynamic_batch=True)
    assert (file.inputs, file.outputs) == ({"x": ("batch", 3, 16, 16)}, {"output": ("batch", 5)})
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(file.path), options, ["CPUExecutionProvider"])
    for batch in (1, 5):
        images = torch.randn(batch, 3, 16, 16)
        (made,) = session.run(None, {"x": images.numpy()})
        step = float(qat.get_submodule("net.8.activation_post_process").scale)
        assert (torch.tensor(made) - qat(images)).abs().max() < 1.5 * step


def test_a_layer_with_32_bits_leaves_floats(
    between: Fixture, prepared: Fixture, found: Fixture
) -> None:
    import onnx

    x = torch.randn(2, 3, 8, 8)
    net = between(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    qat = prepared(net, x, {"module_name": [("net.2", get_default_qat_out_qconfig())]})
    file, _, lint = found(qat, x, "horizon")
    assert onnx.load(file.path).graph.node[-1].op_type == "Conv"
    assert (file.floats, lint) == ((), set())


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("factor", [0.0, 1e-9])
def test_a_channel_that_is_its_bias_alone(
    factor: float, profile: str, between: Fixture, prepared: Fixture, found: Fixture
) -> None:
    x = torch.randn(2, 3, 8, 8)
    net = between(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    net.get_submodule("net.0").weight.data[1] *= factor
    net.get_submodule("net.0").bias.data[1] = 50.0
    file, counted, lint = found(prepared(net, x), x, profile)
    assert lint == set()
    # In steps of its sums the bias is more than int32 holds, which onnxruntime's files need.
    assert any("larger steps" in note for note in file.notes) == (profile == "onnxruntime")
    assert all(largest <= 1 for _, _, largest in counted.values())


class Twice(nn.Module):
    """A layer and a sum that are called twice, a fixed scale, results returned in several forms."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 64), DeQuantStub()
        self.stem, self.conv = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.sum = FloatFunctional()

    def forward(self, x: Tensor) -> Any:
        first = self.conv(self.stem(self.quant(x)))
        second = self.sum.add(first, self.conv(first))
        third = self.sum.add(second, second)
        return self.dequant([second, third]), third, x


@pytest.mark.parametrize("profile", PROFILES)
def test_what_is_called_twice_is_in_the_file_once(
    profile: str, prepared: Fixture, found: Fixture
) -> None:
    import onnx

    x = torch.randn(2, 3, 8, 8)
    file, counted, lint = found(prepared(Twice().eval(), x), x, profile)
    assert lint <= ({"TRT012"} if profile == "tensorrt" else set())
    assert list(file.outputs) == ["output_0_0", "output_0_1", "output_1", "output_2"]
    names = [constant.name for constant in onnx.load(file.path).graph.initializer]
    assert names.count("conv.weight") == 1
    assert not any(name.startswith("conv.weight_") and "scale" not in name for name in names)
    assert counted["quantize"][0] == 0
    assert all(largest <= 1 for _, _, largest in counted.values())
