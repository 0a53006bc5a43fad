"""Compiled models return what the converted models do, bit for bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.quantization import DeQuantStub

import bevquant_hybrid as horizon
from bevquant_hybrid import nn as horizon_nn
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.quantization import (
    QuantStub,
    compile_model,
    convert,
    convert_fx,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_qat,
    prepare_qat_fx,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)


class Net(nn.Module):
    """Stubs around what is tested."""

    def __init__(self, body: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 64), DeQuantStub()
        self.parts = nn.ModuleList(modules)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.body(self.quant(x), *self.parts))


def one(module: nn.Module) -> Callable[[], Net]:
    return lambda: Net(lambda x, part: part(x), copy.deepcopy(module))


def of(body: Callable[..., Any], *modules: nn.Module) -> Callable[[], Net]:
    return lambda: Net(body, *copy.deepcopy(modules))


def conv(inputs: int = 4, outputs: int = 4, size: int = 1, **settings: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, **settings)


def f() -> nn.Module:
    return horizon_nn.quantized.FloatFunctional()


def padded(x: Tensor) -> Tensor:
    return F.pad(F.pad(x, (1, 2, 0, 1), value=-0.5), (1, 1, 1, 1), "replicate")


def viewed(x: Tensor, linear: nn.Module) -> Tensor:
    return linear(x.permute(0, 2, 3, 1).flatten(1)[:, 2:-2]).reshape(2, -1, 4)


PICTURE = (2, 4, 6, 6)
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv": (one(conv(4, 6, 3, stride=2, padding=1, groups=2)), PICTURE),
    "conv bn relu": (one(nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU())), PICTURE),
    "conv3d": (one(nn.Conv3d(2, 3, 2)), (2, 2, 3, 4, 4)),
    "linear": (one(nn.Linear(6, 5, bias=False)), PICTURE),
    "transposed": (one(nn.ConvTranspose2d(4, 3, 2, 2)), PICTURE),
    "batch norm": (one(nn.BatchNorm2d(4)), PICTURE),
    "max pool": (one(nn.MaxPool2d(3, 2, 1)), PICTURE),
    "average pool": (one(nn.AvgPool2d(2, ceil_mode=True)), (2, 4, 7, 7)),
    "adaptive pool": (one(nn.AdaptiveAvgPool2d(4)), PICTURE),
    "global pool": (one(nn.AdaptiveAvgPool2d(1)), PICTURE),
    "add": (of(lambda x, c, f: f.add(c(x), x), conv(), f()), PICTURE),
    "broadcast sub": (of(lambda x, p, f: f.sub(x, p(x)), nn.AvgPool2d(6), f()), PICTURE),
    "mul": (of(lambda x, s, f: f.mul(x, s(x)), nn.Sigmoid(), f()), PICTURE),
    "cat": (of(lambda x, c, f: f.cat([c(x), x, x], 1), conv(4, 3), f()), PICTURE),
    "mean": (of(lambda x, f: f.mean(x, [2, 3], keepdim=True), f()), PICTURE),
    "sum": (of(lambda x, f: f.sum(x, 1, keepdim=True), f()), PICTURE),
    "matmul": (of(lambda x, f: f.matmul(x, x, y_trans=True), f()), PICTURE),
    "maximum": (of(lambda x, c, f: f.maximum(x, c(x)), conv(), f()), PICTURE),
    "numbers": (of(lambda x, f, g: g.mul_scalar(f.add_scalar(x, -0.3), 1.7), f(), f()), PICTURE),
    "softmax": (one(nn.Softmax(1)), PICTURE),
    "layer norm": (one(nn.LayerNorm([6, 6])), PICTURE),
    "tables": (of(lambda x, a, b: b(a(x)), nn.GELU(), horizon_nn.Exp()), PICTURE),
    "nearest": (of(lambda x: F.interpolate(x, scale_factor=2, mode="nearest")), PICTURE),
    "bilinear": (of(lambda x: F.interpolate(x, (9, 5), mode="bilinear")), PICTURE),
    "pad": (of(padded), PICTURE),
    "views": (of(viewed, nn.Linear(140, 8)), PICTURE),
}


def converted(model: nn.Module, *inputs: Tensor, flow: str = "eager", dtype: str = "qint8") -> Any:
    """Prepare, observe once and convert."""
    model.qconfig = get_default_qat_qconfig(dtype=dtype)
    if flow == "fx":
        made = prepare_qat_fx(model)
        made(*inputs)
        return convert_fx(made)
    made = prepare_qat(model)
    made(*inputs)
    return convert(made.eval())


def compiled(
    model: Any, inputs: Any, folder: Any, **settings: Any
) -> horizon.runtime.CompiledModel:
    assert compile_model(model, inputs, hbm=folder / "made" / "model.hbm", **settings) == 0
    return horizon.runtime.load(folder / "made" / "model.hbm")


def assert_equal(result: Any, expected: Any) -> None:
    """The same nesting, types and values."""
    if isinstance(expected, QTensor):
        assert isinstance(result, QTensor)
        assert result.dtype == expected.dtype
        assert result.q_per_channel_axis() == expected.q_per_channel_axis()
        assert torch.equal(result.q_scale(), expected.q_scale())
        assert_equal(result.int_repr(), expected.int_repr())
    elif isinstance(expected, Tensor):
        assert type(result) is Tensor
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)
    elif isinstance(expected, dict):
        assert list(result) == list(expected)
        for key, value in expected.items():
            assert_equal(result[key], value)
    elif isinstance(expected, list | tuple):
        assert type(result) is (list if isinstance(expected, list) else tuple)
        assert len(result) == len(expected)
        for mine, other in zip(result, expected, strict=True):
            assert_equal(mine, other)
    else:
        assert result == expected


def hard_values(*shape: int) -> list[Tensor]:
    """Random ones, ones that saturate, ones between two steps, and none."""
    ties = (torch.randint(-200, 200, shape) + 0.5) / 64
    signs = torch.randint(0, 2, shape) * 2.0 - 1
    return [torch.randn(shape), 1e30 * signs, ties, torch.zeros(shape)]


@pytest.mark.parametrize("flow", ["eager", "fx"])
@pytest.mark.parametrize("name", NETS)
def test_what_is_compiled_returns_what_was_converted(name: str, flow: str, tmp_path) -> None:
    make, shape = NETS[name]
    x = torch.randn(shape)
    model = converted(make(), x, flow=flow)
    made = compiled(model, [x], tmp_path)
    for values in hard_values(*shape):
        assert_equal(made(values), model(values))
    traced = compiled(torch.jit.trace(model, x), x, tmp_path, opt="fast")
    assert_equal(traced(x), model(x))


@pytest.mark.parametrize("name", ["conv", "add", "mul", "tables", "cat", "softmax", "numbers"])
def test_sixteen_bits(name: str, tmp_path) -> None:
    make, shape = NETS[name]
    x = torch.randn(shape)
    model = converted(make(), x, dtype="qint16")
    made = compiled(model, (x,), tmp_path)
    for values in hard_values(*shape):
        assert_equal(made(values), model(values))


class Heads(nn.Module):
    """Two inputs; outputs of 32 bits, quantized ones, indices and numbers, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = QuantStub(scale=1 / 64), QuantStub(scale=1 / 32)
        self.add, self.dequant = nn.quantized.FloatFunctional(), DeQuantStub()
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 1)
        self.head.qconfig = get_default_qat_out_qconfig()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        shared = self.body(self.add.add(self.left(x), self.right(y)))
        out = self.head(shared)
        return {
            "boxes": [self.dequant(out), out, out.permute(0, 2, 3, 1).flatten(0, 2)],
            "scores": (shared, shared.argmax(1), torch.max(shared, 1)),
            1: {"count": 5, "nothing": None, "input": x},
        }


@pytest.mark.parametrize("flow", ["eager", "fx"])
def test_several_inputs_and_nested_outputs(flow: str, tmp_path) -> None:
    x, y = torch.randn(2, 3, 6, 6), torch.randn(2, 3, 6, 6)
    model = converted(Heads(), x, y, flow=flow)
    made = compiled(model, [x, y], tmp_path)
    for left, right in zip(hard_values(2, 3, 6, 6), hard_values(2, 3, 6, 6)[::-1], strict=True):
        result, expected = made(left, right), model(left, right)
        expected["scores"] = (*expected["scores"][:2], tuple(expected["scores"][2]))
        assert_equal(result, expected)
    assert [port.name for port in made.inputs] == ["x", "y"]
    assert [made.scale_of(port).item() for port in made.inputs] == [1 / 64, 1 / 32]
    names = [port.name for port in made.outputs]
    assert names[:4] == ["boxes.0", "boxes.1", "boxes.2", "scores.0"]
    assert made.scale_of(made.outputs[0]).shape == (5,)


def test_one_tensor_given_twice_stays_two_inputs(tmp_path) -> None:
    x, y = torch.randn(1, 3, 4, 4), torch.randn(1, 3, 4, 4)
    model = converted(Heads(), x, y)
    made = compiled(model, [x, x], tmp_path)
    assert_equal(made(x, y)["boxes"], model(x, y)["boxes"])


class Nested(nn.Module):
    """Inputs in lists and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.cat = QuantStub(scale=1 / 64), nn.quantized.FloatFunctional()

    def forward(self, views: list[Tensor], more: dict[str, Tensor]) -> QTensor:
        return self.cat.cat([self.quant(x) for x in [*views, more["depth"]]], 1)


def test_nested_inputs(tmp_path) -> None:
    inputs = [torch.randn(1, 2, 3), torch.randn(1, 1, 3)], {"depth": torch.randn(1, 4, 3)}
    model = converted(Nested(), *inputs)
    made = compiled(model, inputs, tmp_path)
    assert_equal(made(*inputs), model(*inputs))
    assert [port.name for port in made.inputs] == ["views.0", "views.1", "more.depth"]
    with pytest.raises(
        TypeError, match=r"Nested: expected 3 tensors \(views\.0: float32\[1, 2, 3\]"
    ):
        made(inputs[0], [inputs[1]["depth"]])


class Picked(nn.Module):
    """An output whose size the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv = QuantStub(scale=1 / 64), nn.Conv2d(2, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return horizon.functional.filter(self.conv(self.quant(x)), threshold=0.3)


def test_sizes_that_the_data_decide(tmp_path) -> None:
    x = torch.randn(2, 2, 8, 8)
    model = converted(Picked(), x)
    made = compiled(model, x, tmp_path)
    assert made.outputs[0].shape is None
    for values in hard_values(2, 2, 8, 8):
        assert_equal(made(values), model(values))


def test_other_rounding(tmp_path) -> None:
    model = Net(lambda x, f: f.add(x, x), f())
    model.qconfig = get_default_qat_qconfig()
    made = prepare_qat(model)
    ties = (torch.randint(-200, 200, (3, 5)) + 0.5) / 64
    made(ties)
    even = convert(made.eval(), rounding="half_even")
    assert_equal(compiled(even, ties, tmp_path)(ties), even(ties))
    assert not torch.equal(even(ties), convert(made)(ties))


def test_no_module_runs_and_nothing_is_unpickled(tmp_path, monkeypatch) -> None:
    make, shape = NETS["conv bn relu"]
    x = torch.randn(shape)
    model = converted(make(), x)
    expected = model(x)
    compile_model(model, x, hbm=tmp_path / "model.hbm")
    del model

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a module ran, or something was unpickled")

    monkeypatch.setattr(nn.Module, "__call__", forbidden)
    monkeypatch.setattr(pickle, "Unpickler", forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    assert_equal(horizon.runtime.load(tmp_path / "model.hbm")(x), expected)


def test_channels_last(tmp_path) -> None:
    x, y = torch.randn(2, 3, 6, 5), torch.randn(2, 3, 6, 5)
    model = converted(Heads(), x, y)
    made = compiled(model, [x, y], tmp_path, input_layout="NHWC", output_layout="NHWC")
    assert made.inputs[0].shape == (2, 6, 5, 3)
    result, expected = made(x.permute(0, 2, 3, 1), y.permute(0, 2, 3, 1)), model(x, y)
    assert_equal(result["boxes"][0], expected["boxes"][0].permute(0, 2, 3, 1))
    assert_equal(result["boxes"][2], expected["boxes"][2])
    assert_equal(result["scores"][1], expected["scores"][1])
    assert torch.equal(result[1]["input"], x.permute(0, 2, 3, 1))
    wide = result["boxes"][1]
    assert wide.q_per_channel_axis() == 3
    assert torch.equal(wide.dequantize(), expected["boxes"][1].dequantize().permute(0, 2, 3, 1))


def test_the_same_model_gives_the_same_file(tmp_path, capsys) -> None:
    make, shape = NETS["add"]
    x = torch.randn(shape)
    model = converted(make(), x)
    for name in ("a", "b"):
        compile_model(model, x, hbm=str(tmp_path / name), name="net")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"compile_model: {tmp_path / 'a'} holds ")
    assert printed[0].endswith("it is no binary for a BPU, and no chip runs it")


def test_a_model_is_compiled_as_it_is_and_stays_so(tmp_path) -> None:
    make, shape = NETS["conv"]
    x = torch.randn(shape)
    model = converted(make(), x)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = compiled(model, x, tmp_path)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    expected = model(x)
    model.parts[0].weight.zero_()
    assert_equal(made(x), expected)
    made(x).zero_()
    assert_equal(made(x), expected)
