"""A detector's backbone, neck and attention through every stage, on every march."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.quantization import DeQuantStub

from bevquant_hybrid.march import KNOWN, March, set_march
from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.quantization import (
    FakeQuantState,
    QuantStub,
    check_model,
    compile_model,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat_fx,
    set_fake_quantize,
)
from bevquant_hybrid.runtime import load
from bevquant_hybrid.utils.onnx_helper import export_to_onnx
from bevquant_hybrid_tools.quant_profiler import _stages, compare_stages, render_stages


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.relu(y)


class Transformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm1(x.flatten(2).transpose(1, 2))
        q, k, v = self.query(tokens), self.key(tokens), self.value(tokens)
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5)
        tokens = tokens + self.out(F.softmax(scores, dim=-1) @ v)
        tokens = tokens + self.down(F.gelu(self.up(self.norm2(tokens))))
        return tokens.transpose(1, 2).reshape(x.shape)


class Detector(nn.Module):
    """ResNet, FPN, a transformer block on the coarsest map, a head."""

    def __init__(self, attends: bool = True) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 128), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.layer1, self.layer2 = Block(8, 8, 1), Block(8, 16, 2)
        self.lateral1, self.lateral2 = nn.Conv2d(8, 8, 1), nn.Conv2d(16, 8, 1)
        self.block = Transformer(8) if attends else nn.Identity()
        self.smooth, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.layer1(self.stem(self.quant(x)))
        coarse = self.block(self.lateral2(self.layer2(fine)))
        above = F.interpolate(coarse, scale_factor=2, recompute_scale_factor=True)
        merged = self.smooth(self.lateral1(fine) + above)
        return self.dequant(self.head(merged)), self.dequant(self.head(coarse))


@pytest.fixture
def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(1, 3, 16, 16, generator=generator) * 2 - 1 for _ in range(3)]


def trained(model: nn.Module, images: list[Tensor], hybrid: bool) -> nn.Module:
    """Calibrated, trained for a step, and left to evaluate."""
    torch.manual_seed(0)
    calibration = prepare_calibration_fx(
        model.eval(), {"": get_default_calib_qconfig()}, hybrid=hybrid
    ).eval()
    for image in images:
        calibration(image)
    qat = prepare_qat_fx(calibration, {"": get_default_qat_qconfig()}, hybrid=hybrid).train()
    optimizer = torch.optim.SGD(qat.parameters(), 1e-3)
    sum(y.square().mean() for y in qat(images[0])).backward()
    optimizer.step()
    qat(images[1])
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.VALIDATION)
    return qat


def round_biases(qat: nn.Module, image: Tensor) -> None:
    """Biases in the steps in which they are added to sums: b · round(bias / b), b = s_x · s_w."""

    def rounded(layer: Any, inputs: tuple[Any, ...]) -> None:
        step = (inputs[0].scale.double() * layer.weight_fake_quant.scale.double()).flatten()
        with torch.no_grad():
            layer.bias.copy_((layer.bias.double() / step).round() * step)

    layers = [m for m in qat.modules() if hasattr(m, "weight_fake_quant")]
    handles = [layer.register_forward_pre_hook(rounded) for layer in layers]
    qat(image)
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("march", KNOWN)
def test_a_hybrid_detector_through_every_stage(
    march: str, images: list[Tensor], tmp_path: Path
) -> None:
    set_march(march)
    torch.manual_seed(1)
    qat = trained(Detector(), images, hybrid=True)
    assert {"layernorm", "softmax", "gelu"} <= {entry.operator.lower() for entry in qat.on_cpu}
    # Halves to even, as training rounds them: what is left are biases, which sums take in steps.
    converted = convert_fx(qat, rounding="half_even")
    stages = compare_stages(qat, converted, images[2])
    assert {s.place for s in stages} == {"BPU", "CPU"}
    beside = {s.name: (s.forced, s.forced_steps) for s in stages if s.place == "BPU" and s.forced}
    assert all(steps <= 1 for _, steps in beside.values()), beside
    assert sum(count for count, _ in beside.values()) <= 0.01 * sum(s.elements for s in stages)
    step = float(qat.head.activation_post_process.scale)
    with torch.no_grad():
        for y, z in zip(qat(images[2]), converted(images[2]), strict=True):
            assert float((y - z).abs().max()) <= 2.1 * step
    round_biases(qat, images[2])
    stages = compare_stages(qat, convert_fx(qat, rounding="half_even"), images[2])
    different = {s.operator: s.forced for s in stages if s.place == "BPU" and s.forced}
    assert different.keys() <= {"LinearAdd"}  # what is added is taken in steps of the sums, too
    assert sum(different.values()) <= 1
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    file = tmp_path / "net.onnx"
    export_to_onnx(qat, images[2], file, opset_version=13, operator_export_type=None)
    options = runtime.SessionOptions()
    # Fused into integer kernels, sums saturate on x86 without VNNI.
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(file, options)
    got = session.run(None, {session.get_inputs()[0].name: images[2].numpy()})
    for y, z in zip(qat(images[2]), got, strict=True):
        apart = (y.detach() - torch.from_numpy(z)).abs() / step
        assert float(apart.max()) <= 2.1
        assert float((apart > 0.5).float().mean()) <= 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"hybrid|float"):
            compile_model(converted, [images[2]], hbm=tmp_path / "net.hbm")


@pytest.mark.parametrize("march", KNOWN)
def test_the_same_detector_on_the_bpu_alone_is_compiled(
    march: str, images: list[Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_march(march)
    torch.manual_seed(1)
    attends = march != March.BERNOULLI2  # which has no layer norm, softmax or linear layer
    qat = trained(Detector(attends), images, hybrid=False)
    converted = convert_fx(qat)
    assert check_model(converted, images[2]) == 0
    assert compile_model(converted, [images[2]], hbm=tmp_path / "net.hbm") == 0
    compiled = load(tmp_path / "net.hbm")
    for y, z in zip(compiled(images[2]), converted(images[2]), strict=True):
        assert torch.equal(y, z)
    stages = compare_stages(qat, converted, images[2], compiled)
    assert all(s.forced_steps <= 1 for s in stages if not s.operator.startswith("Soft"))
    assert {s.compiled for s in stages} <= {0, None}
    assert sum(s.compiled == 0 for s in stages) >= 12
    round_biases(qat, images[2])
    stages = compare_stages(qat, convert_fx(qat, rounding="half_even"), images[2])
    assert {s.free for s in stages} == {0}  # the integers of training, at every operator
    table = render_stages(stages)
    assert table.splitlines()[0].split()[:3] == ["operator", "class", "on"]
    assert len(table.splitlines()) == len(stages) + 2


def test_bernoulli2_refuses_to_compile_attention(images: list[Tensor], tmp_path: Path) -> None:
    set_march(March.BERNOULLI2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inputs that have not four axes
        qat = trained(Detector(), images, hybrid=False)
        converted = convert_fx(qat)
        with pytest.raises(ValueError, match=r"conditions of BERNOULLI2 are not met"):
            compile_model(converted, [images[2]], hbm=tmp_path / "net.hbm")
    assert not (tmp_path / "net.hbm").exists()


def test_differences_add_up_behind_many_layers_and_are_small_in_each(images: list[Tensor]) -> None:
    layers = [m for _ in range(13) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(QuantStub(), nn.Conv2d(3, 8, 1), *layers, DeQuantStub())
    qat = prepare_qat_fx(model, {"": get_default_qat_qconfig()})
    qat(images[0])
    qat.eval()
    stages = compare_stages(qat, convert_fx(qat), images[0])
    assert max(s.forced_steps for s in stages) <= 1
    assert sum(s.free for s in stages) > sum(s.forced for s in stages)


def test_methods_of_a_tensor_that_a_module_keeps_are_no_stage(images: list[Tensor]) -> None:
    class Embedded(nn.Module):
        """Adds a table that is a plain tensor, moved to the input's device as its models do."""

        def __init__(self) -> None:
            super().__init__()
            self.quant, self.table_quant, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
            self.conv, self.add = nn.Conv2d(3, 4, 1), FloatFunctional()
            self.table = torch.rand(4, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            table = self.table_quant(self.table.to(x.device))
            return self.dequant(self.add.add(self.conv(self.quant(x)), table))

    qat = prepare_qat_fx(Embedded(), {"": get_default_qat_qconfig()})
    qat(images[0])
    qat.eval()
    stages = compare_stages(qat, convert_fx(qat), images[0])
    on_bpu = [stage for stage in stages if stage.place == "BPU"]
    assert {stage.name for stage in on_bpu} == {"quant", "table_quant", "add"}  # conv is in add
    assert max(stage.forced_steps for stage in on_bpu) <= 1


def test_stages_of_other_models_are_refused(images: list[Tensor]) -> None:
    qat = prepare_qat_fx(
        nn.Sequential(QuantStub(), nn.Conv2d(3, 1, 1)), {"": get_default_qat_qconfig()}
    )
    qat(images[0])
    with pytest.raises(TypeError, match="prepare_qat_fx and convert_fx"):
        compare_stages(qat, qat, images[0])
    other = prepare_qat_fx(
        nn.Sequential(QuantStub(), nn.Conv2d(3, 1, 1), nn.ReLU6(), nn.MaxPool2d(2)),
        {"": get_default_qat_qconfig()},
    )
    other(images[0])
    with pytest.raises(ValueError, match="the graphs differ"):
        compare_stages(qat, convert_fx(other), images[0])


def test_a_nan_of_one_stage_alone_differs() -> None:
    given, nan = torch.tensor([1.0, float("nan")]), torch.tensor([float("nan")] * 2)
    assert _stages._difference(given, nan) == (1, float("inf"))
    assert _stages._difference(nan, nan.clone()) == (0, 0.0)
