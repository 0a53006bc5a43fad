"""Compiled models return what the converted models do, bit for bit."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.quantization import DeQuantStub

import bevquant_hybrid as horizon
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
from bevquant_int8sim.program import rounded


class Net(nn.Module):
    """A convolution, an addition and a table between stubs."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 64), DeQuantStub()
        self.conv, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.Sigmoid()
        self.add = nn.quantized.FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.act(self.add.add(self.conv(x), x)))


def converted(model: nn.Module, *inputs: Any, flow: str = "eager") -> Any:
    """Prepare, observe once and convert."""
    model.qconfig = get_default_qat_qconfig()
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


class Anchored(nn.Module):
    """Outputs that no input changes."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv = QuantStub(scale=1 / 64), nn.Conv2d(3, 4, 1)
        self.register_buffer("anchors", torch.randn(5, 4))

    def forward(self, x: Tensor) -> Any:
        return self.conv(self.quant(x)), self.anchors, self.anchors[1:].flip(0)


def test_constant_outputs_are_the_callers_own(tmp_path) -> None:
    x = torch.randn(1, 3, 4, 4)
    model = converted(Anchored(), x)
    made = compiled(model, x, tmp_path)
    assert made.outputs[1].operand.name == "anchors"
    assert_equal(made(x), model(x))
    for tensor in made(x)[1:]:
        tensor.zero_()
    assert_equal(made(x), model(x))


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
    model = Net()
    model.qconfig = get_default_qat_qconfig()
    made = prepare_qat(model)
    ties = hard_values(2, 4, 6, 6)[2]
    made(ties)
    even = convert(made.eval(), rounding="half_even")
    assert_equal(compiled(even, ties, tmp_path)(ties), even(ties))
    assert not torch.equal(even(ties), convert(made)(ties))


def test_the_rounding_of_a_program_is_its_steps(tmp_path) -> None:
    model = nn.Sequential(QuantStub(scale=1 / 64), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1))
    model.qconfig = get_default_qat_qconfig()
    made = prepare_qat(model)
    ties = hard_values(2, 4, 6, 6)[2]
    made(ties)
    up, even = convert(made.eval()), convert(made, rounding="half_even")
    program = compiled(up, ties, tmp_path).program
    assert [step.constants["rounding"] for step in program.steps[:2]] == ["half_up"] * 2
    changed = horizon.runtime.CompiledModel(rounded(program, "half_even", "float64"))
    assert torch.equal(changed(ties).int_repr(), even(ties).int_repr())
    assert not torch.equal(up(ties).int_repr(), even(ties).int_repr())


def test_no_module_runs_and_nothing_is_unpickled(tmp_path, monkeypatch) -> None:
    x = torch.randn(2, 4, 6, 6)
    model = converted(Net(), x)
    expected = model(x)
    compile_model(model, x, hbm=tmp_path / "model.hbm")
    del model

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a module ran, or something was unpickled")

    monkeypatch.setattr(nn.Module, "__call__", forbidden)
    monkeypatch.setattr(pickle, "Unpickler", forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    assert_equal(horizon.runtime.load(tmp_path / "model.hbm")(x), expected)


def test_every_documented_option_is_taken(tmp_path) -> None:
    x = torch.randn(2, 4, 6, 6)
    model = converted(Net(), x)
    expected = model(x)
    for opt in (*range(4), "O0", "O1", "O2", "O3", "ddr", "fast", "balance"):
        assert torch.equal(compiled(model, [x], tmp_path, opt=opt)(x), expected)
    settings = {"balance_factor": 50, "jobs": 0, "progressbar": False, "debug": False}
    settings |= {"extra_args": ["--ability-entry", "1"], "input_source": ["pyramid"]}
    made = compiled(model, x, tmp_path, name="digits", march="bernoulli2", opt=1, **settings)
    assert (made.name, made.march) == ("digits", "bernoulli2")
    assert made.program.options == {
        "input_source": ["pyramid"],
        "input_layout": "NCHW",
        "output_layout": "NCHW",
        "opt": "O1",
        "balance_factor": 50,
        "extra_args": ["--ability-entry", "1"],
    }


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
    x = torch.randn(2, 4, 6, 6)
    model = converted(Net(), x)
    for name in ("a", "b"):
        compile_model(model, x, hbm=str(tmp_path / name), name="net")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"compile_model: {tmp_path / 'a'} holds ")
    assert printed[0].endswith("it is no binary for a BPU, and no chip runs it")


def test_a_model_is_compiled_as_it_is_and_stays_so(tmp_path) -> None:
    x = torch.randn(2, 4, 6, 6)
    model = converted(Net(), x)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = compiled(model, x, tmp_path)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    expected = model(x)
    model.conv.weight.zero_()
    assert_equal(made(x), expected)
    made(x).zero_()
    assert_equal(made(x), expected)


class Frames(nn.Module):
    """Reads two inputs of equal shapes out of a dictionary, to which it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 64), DeQuantStub()
        self.near, self.far = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.add = nn.quantized.FloatFunctional()

    def forward(self, frame: dict[str, Tensor]) -> Tensor:
        near, far = self.quant(frame["near"]), self.quant(frame["far"])
        frame["sum"] = self.add.add(self.near(near), self.far(far))
        return self.dequant(frame["sum"])


def test_members_are_found_by_their_keys(tmp_path):
    torch.manual_seed(0)
    frame = {"near": torch.rand(1, 4, 3, 3), "far": -torch.rand(1, 4, 3, 3)}
    model = converted(Frames(), dict(frame))
    made = compiled(model, (frame,), tmp_path)
    assert [*frame] == ["near", "far"]
    other = dict(reversed(frame.items()))
    assert torch.equal(made(other), model(dict(frame)))
    first, second = made.values(frame), made.values(other)
    assert all(torch.equal(second[name], value) for name, value in first.items())
