"""What compile_model and compiled models refuse, and what they say then."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.quantization import DeQuantStub

from bevquant_hybrid import march, runtime
from bevquant_hybrid.quantization import (
    QuantStub,
    compile_model,
    convert,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    prepare_calibration,
    prepare_qat,
    prepare_qat_fx,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)

X = torch.rand(1, 2, 4, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self, tail: Any = None) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 128), DeQuantStub()
        self.block = nn.Sequential(nn.Conv2d(2, 3, 1))
        self.tail = tail or nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.tail(self.dequant(self.block(self.quant(x))))


def converted(model: nn.Module) -> nn.Module:
    """Only the tail stays as it is."""
    model.qconfig = get_default_qat_qconfig()
    model.tail.qconfig = None
    qat = prepare_qat(model)
    qat(X)
    return convert(qat.eval())


@pytest.fixture(scope="module")
def model() -> nn.Module:
    before = march.get_march()
    march.set_march("bayes")
    made = converted(Net())
    march._chosen[:] = [before] if before else []
    return made


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "opt 4": ({"opt": 4}, ValueError, "opt=4: expected 0 to 3 or one of O0, O1"),
    "opt true": ({"opt": True}, ValueError, "opt=True"),
    "opt text": ({"opt": "o2"}, ValueError, "opt='o2'"),
    "opt none": ({"opt": None}, ValueError, "opt=None"),
    "march": ({"march": "nash"}, ValueError, "march='nash': expected one of bernoulli2, bayes"),
    "source": ({"input_source": "camera"}, ValueError, "input_source='camera'"),
    "sources": ({"input_source": ["ddr", "ddr"]}, ValueError, "2 sources for 1 inputs"),
    "source 3": ({"input_source": 3}, ValueError, "input_source=3"),
    "layout": ({"input_layout": "CHWN"}, ValueError, "input_layout='CHWN'"),
    "raw": ({"output_layout": "BPU_RAW"}, ValueError, "output_layout='BPU_RAW'.*not public"),
    "no layout": ({"output_layout": None}, ValueError, "output_layout=None"),
    "balance": ({"balance_factor": "2"}, ValueError, "balance_factor='2'"),
    "jobs": ({"jobs": -1}, ValueError, "jobs=-1"),
    "extra": ({"extra_args": "-O"}, TypeError, "extra_args='-O': expected a list of strings"),
    "name": ({"name": 5}, TypeError, "name is a int"),
    "folder name": ({"name": "a/b"}, ValueError, "name='a/b'"),
    "hbm": ({"hbm": 5}, TypeError, "hbm is a int: expected the path of a file"),
    "no hbm": ({"hbm": ""}, ValueError, "hbm=''"),
    "hbm folder": ({"hbm": "/"}, ValueError, "hbm='/'"),
    "module": ({"module": torch.relu}, TypeError, "module is a builtin_function_or_method"),
    "inputs": ({"example_inputs": 3}, TypeError, "example_inputs is a int: expected a tensor"),
    "no inputs": ({"example_inputs": []}, ValueError, "example_inputs is empty"),
    "array": ({"example_inputs": [X.numpy()]}, TypeError, r"example_inputs\[0\] is a ndarray"),
    "key": ({"example_inputs": [{1.5: X}]}, TypeError, r"example_inputs\[0\] is a float"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument_is_named(what: str, model, tmp_path) -> None:
    given, kind, message = WRONG[what]
    settings = {"module": model, "example_inputs": [X], "hbm": tmp_path / "a" / "m.hbm", **given}
    with pytest.raises(kind, match=f"compile_model: .*{message}"):
        compile_model(**settings)
    assert list(tmp_path.iterdir()) == []


def test_the_documented_signature() -> None:
    found = inspect.signature(compile_model).parameters.values()
    assert [(parameter.name, parameter.default) for parameter in found] == [
        *((name, inspect.Parameter.empty) for name in ("module", "example_inputs", "hbm")),
        *(("march", None), ("name", None), ("input_source", "ddr"), ("input_layout", None)),
        *(("output_layout", "NCHW"), ("opt", "O2"), ("balance_factor", 2), ("progressbar", True)),
        *(("jobs", 16), ("debug", True), ("extra_args", None)),
    ]


def test_a_march_that_nobody_set(model, tmp_path) -> None:
    march._chosen[:] = []
    with pytest.raises(ValueError, match=r"march=None and no march is set; call .*set_march"):
        compile_model(model, X, hbm=tmp_path / "m.hbm")
    compile_model(model, X, hbm=tmp_path / "m.hbm", march="BAYES_E")
    assert runtime.load(tmp_path / "m.hbm").march == "bayes-e"


@pytest.mark.parametrize(
    ("inputs", "error", "reason"),
    [
        ([torch.rand(1, 5, 4, 4)], ValueError, "do not fit"),
        ([X.double().int()], TypeError, "float"),
        ([X, X], TypeError, "positional"),
        ([X.sub(X).div(0)], ValueError, "NaN"),
    ],
)
def test_inputs_that_the_model_does_not_take(inputs, error, reason: str, model, tmp_path) -> None:
    with pytest.raises(error, match=reason):
        compile_model(model, inputs, hbm=tmp_path / "m.hbm")


def test_models_that_are_not_converted(tmp_path) -> None:
    path = tmp_path / "m.hbm"
    with pytest.raises(ValueError, match="no fixed-point module; prepare it"):
        compile_model(Net(), X, hbm=path)
    model = Net()
    model.qconfig = get_default_qat_qconfig()
    with pytest.raises(ValueError, match=r"trains quantized .*quant\.activation_post_process"):
        compile_model(prepare_qat(model), X, hbm=path)
    model.qconfig = get_default_calib_qconfig()
    with pytest.raises(ValueError, match="is calibrated"):
        compile_model(prepare_calibration(model), X, hbm=path)
    traced = torch.jit.trace(nn.Conv2d(2, 2, 1).eval(), X)
    with pytest.raises(ValueError, match="aten::_convolution is no operator of an integer program"):
        compile_model(traced, X, hbm=path)
    moved = torch.jit.trace(nn.Flatten(), X)
    with pytest.raises(ValueError, match="module computes nothing in integers"):
        compile_model(moved, X, hbm=path)


def test_a_hybrid_model_is_for_the_mapper(tmp_path) -> None:
    model = Net(nn.PReLU())
    qat = prepare_qat_fx(model, {"": get_default_qat_qconfig()}, hybrid=True)
    qat(X)
    fixed = convert_fx(qat)
    with pytest.raises(ValueError, match=r"module is a hybrid model.*export_to_onnx.*hb_mapper"):
        compile_model(fixed, X, hbm=tmp_path / "m.hbm")
    with pytest.raises(ValueError, match=r"module tail: aten::prelu .*hybrid.*export_to_onnx"):
        compile_model(torch.jit.trace(fixed, X), X, hbm=tmp_path / "m.hbm")


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.max() > 0.5 else -x


class Lists(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor(x.tolist())


class Arrays(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().copy())


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, torch.rand(3)


class Overwrites(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t_() if x.dim() == 2 else x.squeeze_(0)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return x, torch.full((1,), self.calls)


class Sized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found = (x > 0.1).nonzero()
        return found.reshape(-1)


TAILS: dict[str, tuple[nn.Module, type[Exception], str]] = {
    "sigmoid": (nn.Sigmoid(), ValueError, "module tail: aten::sigmoid is no operator"),
    "linear": (nn.Linear(4, 4), ValueError, "module tail: aten::.*mm.* is no operator"),
    "inside": (nn.Sequential(nn.ELU()), ValueError, r"module tail\.0: aten::elu is no operator"),
    "float": (Doubled(), ValueError, r"module tail: aten::mul\.Tensor computes in float32"),
    "number": (Decides(), ValueError, r"module tail: aten::_local_scalar_dense .*item\(\)"),
    "random": (Draws(), ValueError, "module tail: aten::rand draws random numbers"),
    "in place": (Overwrites(), ValueError, "module tail: aten::squeeze_.dim is no operator"),
    "size": (Sized(), ValueError, "module tail: aten::reshape reads a tensor whose size depends"),
    "counts": (Counts(), RuntimeError, "output 1 of the program is not what the model returned"),
    "numpy": (Arrays(), RuntimeError, "output output of the program is not what the model"),
}


@pytest.mark.parametrize("what", TAILS)
def test_operators_that_are_none_of_a_program(what: str, tmp_path) -> None:
    tail, kind, message = TAILS[what]
    model = converted(Net(tail))
    with pytest.raises(kind, match=f"compile_model: .*{message}"):
        compile_model(model, X, hbm=tmp_path / "m.hbm")
    assert list(tmp_path.iterdir()) == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("what", ["sigmoid", "inside", "float"])
def test_traced_models_name_the_module_too(what: str, tmp_path) -> None:
    tail, kind, message = TAILS[what]
    traced = torch.jit.trace(converted(Net(tail)), X)
    message = message.replace("mul.Tensor", "mul.Scalar").replace(r"mul\.Tensor", "mul.*")
    with pytest.raises(kind, match=f"compile_model: .*{message}"):
        compile_model(traced, X, hbm=tmp_path / "m.hbm")


def test_scripted_models_may_decide_nothing_either(tmp_path) -> None:
    class Scripted(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            y = self.net(x)
            if bool(y.max() > 0.0):
                y = y.flatten()
            return y

    scripted = torch.jit.script(Scripted(torch.jit.trace(converted(Net()), X)))
    with pytest.raises(ValueError, match=r"makes a number of a tensor that depends on the input"):
        compile_model(scripted, X, hbm=tmp_path / "m.hbm")


def test_a_sum_that_leaves_32_bits_keeps_its_error(tmp_path) -> None:
    import bevquant_int8sim as int8sim

    model = nn.Sequential(QuantStub(scale=1e-4), nn.Linear(2**17, 1, bias=False))
    model.qconfig = get_default_qat_qconfig()
    model[0].qconfig = get_default_qat_qconfig(dtype="qint16")
    nn.init.ones_(model[1].weight)
    qat = prepare_qat(model)
    x = torch.full((1, 2**17), 4.0)
    qat(x)
    fixed = convert(qat.eval())
    with pytest.raises(int8sim.AccumulatorOverflowError, match="1: "):
        compile_model(fixed, x, hbm=tmp_path / "m.hbm")
    compile_model(fixed, torch.zeros_like(x), hbm=tmp_path / "m.hbm")
    with pytest.raises(int8sim.AccumulatorOverflowError, match="1: "):
        runtime.load(tmp_path / "m.hbm")(x)


def test_inputs_that_a_compiled_model_does_not_take(model, tmp_path) -> None:
    compile_model(model, X, hbm=tmp_path / "m.hbm")
    made = runtime.load(tmp_path / "m.hbm")
    expected = r"x: float32\[1, 2, 4, 4\]"
    with pytest.raises(TypeError, match=rf"Net: expected 1 tensors \({expected}\).*got 2"):
        made(X, X)
    with pytest.raises(TypeError, match=rf"expected 1 tensors \({expected}\).*got 0"):
        made()
    with pytest.raises(TypeError, match=r"Net: its input\[0\] is a ndarray"):
        made(X.numpy())
    with pytest.raises(TypeError, match=rf"x is torch\.float64: expected {expected}"):
        made(X.double())
    with pytest.raises(ValueError, match=r"x has shape \[2, 2, 4, 4\]: .*compile it again"):
        made(torch.cat([X, X]))
    with pytest.raises(ValueError, match="NaN"):
        made(F.pad(X[..., 1:], (1, 0), value=torch.nan))
