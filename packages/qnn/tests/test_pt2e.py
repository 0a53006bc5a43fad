"""Exported programs are quantized as their models are, by `quantize_model` and by torchao."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import export

from bevquant_fusion import fuse_model
from bevquant_qnn import QuantConfig, pt2e_quantizer, quantize_model
from bevquant_quantizers import TensorQuantizer, calibrate

MAXIMA = QuantConfig(input_calibrator="max")
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self, taken: int, given: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(taken, given, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(given), nn.BatchNorm2d(given)
        self.conv2, self.relu = nn.Conv2d(given, given, 3, 1, 1, bias=False), nn.ReLU(inplace=True)
        self.down = (
            nn.Sequential(nn.Conv2d(taken, given, 1, stride, bias=False), nn.BatchNorm2d(given))
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.down(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stem = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        self.stem = nn.Sequential(*stem)
        self.layers = nn.Sequential(Block(8, 8), Block(8, 16, 2), Block(16, 16))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.layers(self.stem(x))), 1))


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.lateral = nn.ModuleList([nn.Conv2d(8, 8, 1), nn.Conv2d(16, 8, 1)])
        self.up = nn.Upsample(scale_factor=2)
        self.deblock = nn.Sequential(nn.ConvTranspose2d(8, 8, 2, 2), nn.ReLU())
        self.out = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 4, 1)])
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a = F.relu(self.c1(x))
        b = F.relu(self.c2(a))
        p = self.lateral[0](a) + self.up(self.lateral[1](b))
        z = torch.cat([self.out[0](p), self.deblock(self.lateral[1](b))], dim=1)
        return {"scores": self.out[1](z), "map": self.norm(p)}


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.Hardswish(), self.part(), nn.Dropout(), self.part()
        )
        self.head = nn.Linear(8, 3)

    def part(self) -> nn.Sequential:
        deep = nn.Conv2d(16, 16, 3, padding=1, groups=16, padding_mode="reflect")
        return nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU6(), deep, nn.ReLU6(), nn.Conv2d(16, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean([2, 3]))


NETS = [ResNet, Pyramid, Depthwise]


def made(kind: Any) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = kind().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.running_mean, module.running_var):
                assert tensor is not None
                tensor.uniform_(0.5, 2)
    return net


def tensors(value: Any) -> list[Tensor]:
    return [v.detach() for v in torch.utils._pytree.tree_leaves(value)]


def ranges(model: nn.Module) -> dict[str, Tensor]:
    return {k: v for k, v in model.state_dict().items() if k.endswith("_amax")}


@pytest.fixture(scope="module", autouse=True)
def torchao() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its modules warn while they are imported
        return pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")


@pytest.mark.parametrize("kind", NETS)
def test_a_program_is_quantized_as_its_model_is(kind: Any) -> None:
    net = made(kind)
    program = export(net, (IMAGES,))
    eager = quantize_model(fuse_model(copy.deepcopy(net), IMAGES).model, MAXIMA, IMAGES)
    result = quantize_model(fuse_model(program).model, MAXIMA, IMAGES)
    assert [(m.path, m.kind) for m in result.quantized] == [
        (m.path, m.kind) for m in eager.quantized
    ]
    assert [s.readers for s in result.shared] == [s.readers for s in eager.shared]
    calibrate(eager.model, [IMAGES])
    calibrate(result.model, [IMAGES])
    assert list(result.model.state_dict()) == list(eager.model.state_dict())
    assert all(map(torch.equal, ranges(result.model).values(), ranges(eager.model).values()))
    ours, theirs = tensors(result.model(IMAGES)), tensors(eager.model(IMAGES))
    assert all(map(torch.equal, ours, theirs))


def test_a_program_brings_its_inputs_and_keeps_its_parameters() -> None:
    program = export(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.ones(1, 4),)
    )
    copied = quantize_model(program)
    assert [m.path for m in copied.quantized] == ["0", "2"]
    assert copied.model.get_parameter("0.weight") is not program.state_dict["0.weight"]
    result = quantize_model(program, inplace=True)
    assert result.model.get_parameter("0.weight") is program.state_dict["0.weight"]


def placed(model: Any) -> tuple[set[frozenset[str]], dict[str, Any]]:
    """Which modules' inputs share an observer; and by module what its weight's observer is."""
    observed: dict[Any, set[str]] = {}
    weights = {}
    for node in model.graph.nodes:
        for argument in torch.utils._pytree.tree_leaves(list(node.args)):
            if not isinstance(argument, torch.fx.Node) or argument.op != "call_module":
                continue
            observer = model.get_submodule(argument.target)
            if node.op != "call_function" or not hasattr(observer, "calculate_qparams"):
                continue
            path = list(node.meta["nn_module_stack"].values())[-1][0]
            if argument.args[0].op == "get_attr":
                weights[path] = observer
            else:
                observed.setdefault(observer, set()).add(f"{path}:{node.target}")
    return {frozenset(v) for v in observed.values()}, weights


@pytest.mark.parametrize("kind", NETS)
def test_torchao_quantizes_by_our_placement_with_our_ranges(kind: Any, torchao: Any) -> None:
    net = made(kind)
    program = export(net, (IMAGES,))
    result = quantize_model(fuse_model(program).model, MAXIMA, IMAGES)
    calibrate(result.model, [IMAGES])
    quantizer = pt2e_quantizer(MAXIMA)
    prepared = torchao.prepare_pt2e(program.module(), quantizer)
    assert [s.readers for s in quantizer.result.shared] == [s.readers for s in result.shared]
    assert [m.path for m in quantizer.result.quantized] == [m.path for m in result.quantized]
    prepared(IMAGES)
    groups, weights = placed(prepared)
    quantizers = {m for m in result.model.modules() if isinstance(m, TensorQuantizer)}
    per_channel = {m for m in quantizers if m.axis is not None}
    assert len(groups) == len(quantizers) - len(per_channel)
    for path, observer in weights.items():
        scale, zero = observer.calculate_qparams()
        ours = result.model.get_buffer(f"{path}._weight_quantizer._amax").flatten() / 127
        torch.testing.assert_close(scale, ours, rtol=1e-6, atol=0)  # the norm is folded by torch
        assert not zero.any()
    assert len(weights) == len(per_channel)
    converted = torchao.convert_pt2e(prepared)
    for one, other in zip(tensors(converted(IMAGES)), tensors(result.model(IMAGES)), strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_settings_hold_for_torchao_too(torchao: Any) -> None:
    config = QuantConfig(input_calibrator="max", exclude=("2",), narrow_range=True, weight_bits=4)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    quantizer = pt2e_quantizer(config)
    prepared = torchao.prepare_pt2e(export(net, (IMAGES,)).module(), quantizer)
    prepared(IMAGES)
    first, second = (n for n in prepared.graph.nodes if "conv2d" in str(n.target))
    assert all(str(n.target).startswith("activation_post_process") for n in first.args[:2])
    assert not any(str(n.target).startswith("activation_post") for n in second.args)
    limits = [prepared.get_submodule(n.target) for n in first.args[:2]]
    assert [(o.quant_min, o.quant_max) for o in limits] == [(-127, 127), (-7, 7)]
    assert any(s.path == "2" and "excluded" in s.reason for s in quantizer.result.skipped)


def test_a_histogram_observer_searches_as_calibrate_does(torchao: Any) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()
    result = quantize_model(export(net, (IMAGES,)))
    calibrate(result.model, [IMAGES], method="entropy")
    prepared = torchao.prepare_pt2e(
        export(net, (IMAGES,)).module(), pt2e_quantizer(method="entropy")
    )
    prepared(IMAGES)
    groups = [m for m in prepared.modules() if type(m).__name__ == "RangeObserver"]
    scale, _ = groups[0].calculate_qparams()
    assert torch.equal(scale[0], result.model.get_buffer("0._input_quantizer._amax") / 127)


def test_a_grouped_transposed_convolution_stays_float_and_is_noted(torchao: Any) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 4, 2, 2, groups=2)).eval()
    quantizer = pt2e_quantizer(MAXIMA)
    prepared = torchao.prepare_pt2e(export(net, (IMAGES,)).module(), quantizer)
    (node,) = (n for n in prepared.graph.nodes if "conv_transpose" in str(n.target))
    assert not any(str(n.target).startswith("activation_post") for n in node.args[:2])
    assert any(s.path == "1" and "one axis" in s.reason for s in quantizer.result.skipped)


def test_nothing_calibrated_is_an_error(torchao: Any) -> None:
    program = export(nn.Sequential(nn.Linear(4, 4)), (torch.ones(1, 4),))
    prepared = torchao.prepare_pt2e(program.module(), pt2e_quantizer(MAXIMA))
    with pytest.raises(ValueError, match="has seen no values: run the prepared model"):
        torchao.convert_pt2e(prepared)


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from bevquant_qnn import _pt2e

    _pt2e._classes.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao.quantization.pt2e.observer", None)
    with pytest.raises(ImportError, match=r"pip install torchao"):
        pt2e_quantizer()


@pytest.mark.parametrize(
    "setting", [{"unsigned": True}, {"quantize_matmul": True}, {"output_weight_bits": 8}]
)
def test_settings_that_annotations_do_not_have(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=f"these annotations .* leave {name}.* out"):
        pt2e_quantizer(QuantConfig(**setting))
