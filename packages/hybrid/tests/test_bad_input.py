"""What users get wrong, and what is said: the node, what was expected, what to do."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bevquant_hybrid as horizon
from bevquant_hybrid import march
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_calibration,
    prepare_calibration_fx,
    prepare_qat,
    prepare_qat_fx,
)

QAT, OUT, CALIB = (
    get_default_qat_qconfig(),
    get_default_qat_out_qconfig(),
    get_default_calib_qconfig(),
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)
        self.head = nn.Sequential(nn.Conv2d(3, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.head(self.relu(self.bn(self.conv(self.quant(x))))))


def with_qconfig(model: nn.Module, qconfig=QAT) -> nn.Module:
    model.qconfig = qconfig
    return model


PREPARE = {
    "prepare_qat_fx": lambda m: prepare_qat_fx(m, {"": QAT}),
    "prepare_calibration_fx": lambda m: prepare_calibration_fx(m, {"": CALIB}),
    "prepare_qat": lambda m: prepare_qat(with_qconfig(m)),
    "prepare_calibration": lambda m: prepare_calibration(with_qconfig(m, CALIB)),
}


@pytest.mark.parametrize("caller", PREPARE)
def test_an_unset_march(caller: str) -> None:
    march._chosen.clear()
    with pytest.raises(RuntimeError, match=rf"{caller}: no march is set; call .*set_march\(March"):
        PREPARE[caller](Net())


@pytest.mark.parametrize("caller", ["convert", "convert_fx"])
def test_an_unset_march_at_the_end(caller: str) -> None:
    made = prepare_qat_fx(Net(), {"": QAT}) if caller == "convert_fx" else with_qconfig(Net())
    march._chosen.clear()
    with pytest.raises(RuntimeError, match=rf"{caller}: no march is set"):
        {"convert": convert, "convert_fx": convert_fx}[caller](made)


@pytest.mark.parametrize("hybrid", [True, False])
def test_a_layer_of_the_bpu_without_a_qconfig(hybrid: bool) -> None:
    named = {"module_name": {"quant": QAT, "conv": QAT}}
    message = r"node head_0 \(head\.0\) has no qconfig and stays float; set one for it or for the"
    with pytest.warns(UserWarning, match=message):
        made = prepare_qat_fx(Net(), named, hybrid=hybrid)
    if hybrid:
        assert made(torch.randn(1, 2, 3, 3)).shape == (1, 3, 3, 3)
    else:
        with pytest.raises(NotImplementedError, match=r"conv2d cannot take a QTensor.*hybrid=True"):
            made(torch.randn(1, 2, 3, 3))


@pytest.mark.parametrize("hybrid", [True, False])
def test_a_placeholder_straight_into_a_layer(hybrid: bool) -> None:
    class Straight(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.head(self.conv(x)))

    message = r"node conv \(conv\) is on the BPU but reads x, which is not quantized; insert a Quan"
    with pytest.warns(UserWarning, match=message):
        made = prepare_qat_fx(Straight(), {"": QAT}, hybrid=hybrid)
    with pytest.raises(
        TypeError, match=r"conv \(Conv2d\): its input is a float tensor of shape \("
    ):
        made(torch.randn(1, 2, 3, 3))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, attn_mask=torch.ones(3, 3).triu(1).bool())[0]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTMCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize("make", [Masked, Cell])
def test_a_composed_layer_without_a_qconfig_that_reads_quantized_values(make: type) -> None:
    model = nn.Sequential(QuantStub(), make())
    qconfig_dict = {"": QAT, "module_name": [("1.layer", None)]}
    message = rf"{__file__}:\d+: \w+ in 1.layer reads quantized values and has no qconfig: give it"
    with pytest.raises(ValueError, match=message):
        prepare_qat_fx(model, qconfig_dict)
    prepare_qat_fx(model, qconfig_dict, hybrid=True)


DYNAMIC = {
    "if": lambda x: x if x.sum() > 0 else -x,
    "while": lambda x: [x := x / 2 for _ in iter(lambda: bool(x.max() > 1), False)],
    "for": lambda x: sum(v for v in x),
    "len": lambda x: x * len(x),
    "range": lambda x: [x + i for i in range(x.shape[0])],
    "int": lambda x: x[: int(x.sum())],
    "unpacked": lambda x: F.pad(x, (*x.shape, 0)),
    "numpy": lambda x: np.clip(np.asarray(x, dtype=np.float32), 0, 1),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_control_flow_that_depends_on_data(name: str) -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor):
            return DYNAMIC[name](x)

    model = nn.Sequential(QuantStub(), nn.Sequential(nn.Conv2d(2, 2, 1), Branch()))
    message = (
        r"prepare_qat_fx: the forward of 1\.1 \(Branch\) cannot be traced at .*:\d+: .*\. Move what"
    )
    with pytest.raises(ValueError, match=message) as raised:
        prepare_qat_fx(model, {"": QAT})
    assert raised.value.__cause__ is not None
    assert "fx_helper.wrap" in str(raised.value)
    line = DYNAMIC[name].__code__.co_firstlineno
    assert f"cannot be traced at {__file__}:{line}: " in str(raised.value)


@pytest.mark.parametrize("name", ["for", "starred", "list", "zip", "enumerate"])
def test_a_loop_over_a_traced_value_says_which(name: str) -> None:
    loops = {
        "for": lambda x: sum(v for v in x + 1),
        "starred": lambda x: torch.cat([*(x + 1)]),
        "list": lambda x: torch.stack(list(x + 1)),
        "zip": lambda x: [a * b for a, b in zip(x + 1, [1, 2], strict=True)],
        "enumerate": lambda x: [a * i for i, a in enumerate(x + 1)],
    }

    class Loop(nn.Module):
        def forward(self, x: Tensor):
            return loops[name](x)

    with pytest.raises(ValueError, match="it iterates over add, and a traced value has no length"):
        prepare_qat_fx(nn.Sequential(QuantStub(), Loop()), {"": QAT})


def test_names_in_hybrid_dict_that_match_nothing() -> None:
    given = {"module_name": ["hed.0", "conv", "zzzzzz"], "module_type": [nn.PReLU]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = prepare_qat_fx(Net(), {"": QAT}, hybrid=True, hybrid_dict=given)
    messages = [str(w.message) for w in caught]
    assert messages == [
        "hybrid_dict: no module is named 'hed.0'; nearest: head.0, head",
        "hybrid_dict: no module is named 'zzzzzz'",
        "hybrid_dict: the model has no module of class PReLU",
    ]
    assert type(made.conv).__module__.endswith("nn.intrinsic")


def said(step) -> list[str]:
    """What a step warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("eager", [True, False])
def test_inputs_without_four_axes_on_bernoulli2(eager: bool) -> None:
    horizon.march.set_march("bernoulli2")
    model = nn.Sequential(QuantStub(), nn.Conv2d(2, 2, 1), nn.Sigmoid())
    made = prepare_qat(with_qconfig(model)) if eager else prepare_qat_fx(model, {"": QAT})
    assert said(lambda: made(torch.randn(1, 2, 3, 3))) == []
    remedy = (
        "its input has shape (2, 3, 3), but BERNOULLI2 computes on [N, C, H, W]; reshape it to "
        "four axes before the QuantStub, or run this operator on the CPU"
    )
    expected = [f"1 (Conv2d): {remedy}", f"2 (SegmentLUT): {remedy}"]
    assert said(lambda: made(torch.randn(2, 3, 3))) == expected
    # Where the mapper decides, and on other marches, nothing is said.
    assert said(lambda: prepare_qat_fx(model, {"": QAT}, hybrid=True)(torch.randn(2, 3, 3))) == []
    horizon.march.set_march("bayes")
    assert said(lambda: prepare_qat_fx(model, {"": QAT})(torch.randn(2, 3, 3))) == []


def forgotten(path: str) -> str:
    return (
        f"`{path}` has not collected any statistics of activations and its scale is 1, please "
        "check whether this is intended! Run calibration batches before this step"
    )


@pytest.mark.parametrize("caller", ["convert", "convert_fx", "prepare_qat", "prepare_qat_fx"])
def test_a_forgotten_calibration(caller: str) -> None:
    float_model = with_qconfig(Net(), CALIB if caller.startswith("prepare") else QAT)
    prepare = {
        "convert": prepare_qat,
        "convert_fx": prepare_qat_fx,
        "prepare_qat": prepare_calibration,
        "prepare_qat_fx": prepare_calibration_fx,
    }[caller]
    made = prepare(float_model)
    made.qconfig = QAT
    steps = {"convert": convert, "convert_fx": convert_fx, "prepare_qat": prepare_qat}
    steps["prepare_qat_fx"] = prepare_qat_fx
    layers = ["quant", "conv", "bn", "head.0"] if prepare in EAGER else ["quant", "conv", "head.0"]
    assert sorted(said(lambda: steps[caller](made))) == sorted(map(forgotten, layers))


EAGER = (prepare_qat, prepare_calibration)  # where batch norms are fused by hand


def test_preparing_and_converting_twice() -> None:
    traced, eager = prepare_qat_fx(Net(), {"": QAT}), prepare_qat(with_qconfig(Net()))
    told = (
        r"quant \(QuantStub\) is quantized: the model is prepared for quantization-aware training"
    )
    with pytest.raises(ValueError, match=f"prepare_qat_fx: {told} already; pass the float model"):
        prepare_qat_fx(traced, {"": QAT})
    with pytest.raises(ValueError, match=f"prepare_calibration_fx: {told} already; pass"):
        prepare_calibration_fx(traced, {"": CALIB})
    told = r"prepare_qat: quant \(QuantStub\) is quantized: the model is prepared already; pass the"
    with pytest.raises(ValueError, match=told):
        prepare_qat(eager)
    for made, steps in (
        (traced, (convert_fx, lambda m: prepare_qat_fx(m, {"": QAT}))),
        (eager, (convert, prepare_qat)),
    ):
        made(torch.randn(1, 2, 3, 3))
        converted = (convert_fx if made is traced else convert)(made)
        for step in steps:
            with pytest.raises(
                ValueError, match=r"quant \(Quantize\) computes in integers: the mod"
            ):
                step(converted)


class Reflects(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head[0] = nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect")


class Slopes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.append(nn.PReLU(3))


class Adds(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.quant(x)
        return super().forward(x) + self.dequant(self.conv(y) + self.conv(y))


class Branches(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else super().forward(x)


class Crosses(Net):
    def __init__(self) -> None:
        super().__init__()
        self.prelu = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.head(self.prelu(self.conv(self.quant(x)))))


WEIGHTLESS = torch.quantization.QConfig(activation=QAT.activation, weight=None)
FAILURES = {
    "padding": (Reflects, {"": QAT}, {}, ValueError, "a BPU pads with zeros"),
    "slopes": (Slopes, {"": QAT}, {}, ValueError, "one table holds one slope"),
    "sum without a scale": (Adds, {"": OUT, "module_name": dict.fromkeys(("quant", "conv"), QAT)},
        {}, ValueError, "its result needs a scale"),
    "no weight": (Net, {"": QAT, "module_name": {"head": WEIGHTLESS}}, {}, ValueError, "a weight"),
    "control flow": (Branches, {"": QAT}, {}, ValueError, "cannot be traced"),
    "key": (Net, {"modules": []}, {}, ValueError, "unknown key 'modules'"),
    "no dictionary": (Net, [QAT], {}, TypeError, "expected a dictionary"),
    "hybrid key": (Net, {"": QAT}, {"hybrid": True, "hybrid_dict": {"name": []}},
        ValueError, "unknown key 'name'"),
    "boundary": (Crosses, {"": QAT, "module_name": {"prelu": None}}, {"hybrid": True}, ValueError,
        "no qconfig with an activation"),
    "march": (Net, {"": QAT}, {}, RuntimeError, "no march is set"),
}  # fmt: skip


def facts(model: nn.Module):
    """What a failure must not change: classes, attributes, parameters, buffers, modes."""
    return {
        path: (
            type(m),
            m.training,
            sorted(m.__dict__),
            [*m._modules],
            [*m._parameters],
            [*m._buffers],
        )
        for path, m in model.named_modules(remove_duplicate=False)
    }


@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_preparation_leaves_the_float_model_as_it_was(name: str) -> None:
    make, qconfig_dict, settings, error, message = FAILURES[name]
    model = make().train()
    kept = facts(model), dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    printed, modules = repr(model), dict(model.named_modules())
    if name == "march":
        march._chosen.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error, match=message):
            prepare_qat_fx(model, qconfig_dict, **settings)
    unchanged(model, kept, printed, modules)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("make", [Reflects, Slopes])
def test_so_does_one_without_tracing(make, inplace: bool) -> None:
    model = with_qconfig(make())
    kept = facts(model), dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    printed, modules = repr(model), dict(model.named_modules())
    with pytest.raises(ValueError, match=r"head\.[01] \((Conv2d|PReLU)\)"):
        prepare_qat(model, inplace=inplace)
    unchanged(model, kept, printed, modules)


def test_and_one_that_succeeds() -> None:
    model = Net()
    kept = facts(model), dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    printed, modules = repr(model), dict(model.named_modules())
    calibrated = prepare_calibration_fx(model, {"": CALIB}).eval()
    calibrated(torch.randn(1, 2, 3, 3))
    made = prepare_qat_fx(calibrated, {"": QAT})
    unchanged(model, kept, printed, modules)
    convert_fx(made)
    unchanged(model, kept, printed, modules)


def unchanged(model: nn.Module, kept, printed: str, modules: dict[str, nn.Module]) -> None:
    before, parameters, state = kept
    assert facts(model) == before
    assert repr(model) == printed
    assert all(modules[path] is module for path, module in model.named_modules())
    assert all(parameters[path] is p for path, p in model.named_parameters())
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("scale", [[0.1], "0.1", torch.tensor([0.1, 0.2]), True, 1j])
def test_a_stub_takes_one_number(scale) -> None:
    with pytest.raises(TypeError, match=r"QuantStub\(scale=.*expected one number, such as 1 / 128"):
        QuantStub(scale=scale)


@pytest.mark.parametrize("scale", [0.0, -1, float("nan"), float("inf")])
def test_a_scale_is_positive_and_finite(scale: float) -> None:
    with pytest.raises(ValueError, match=r"QuantStub\(scale=.*expected a positive, finite scale"):
        QuantStub(scale=scale)


@pytest.mark.parametrize("scale", [0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor([0.5]), 1])
def test_a_scale_may_be_any_kind_of_number(scale) -> None:
    assert QuantStub(scale=scale).scale == float(scale)


MISSPELT = {"avg_constant": 0}


@pytest.mark.parametrize(
    ("make", "which"),
    [
        (lambda: get_default_qat_qconfig(activation_qkwargs=MISSPELT), "activation_qkwargs"),
        (lambda: get_default_qat_qconfig(weight_qkwargs=MISSPELT), "weight_qkwargs"),
        (lambda: get_default_qat_out_qconfig(weight_qkwargs=MISSPELT), "weight_qkwargs"),
        (lambda: horizon.quantization.get_default_qconfig(weight_qkwargs=MISSPELT), "weight_qkw"),
        (lambda: get_default_calib_qconfig(calib_qkwargs=MISSPELT), "calib_qkwargs"),
    ],
)
def test_a_misspelt_setting_is_named_where_it_is_written(make, which: str) -> None:
    with pytest.raises(TypeError, match=rf"{which}.*Quantize and \w+Observer take no 'avg_consta"):
        make()


def test_settings_are_a_dictionary() -> None:
    with pytest.raises(TypeError, match=r"activation_qkwargs=\['dtype'\]: expected a dictionary"):
        get_default_qat_qconfig(activation_qkwargs=["dtype"])
    with pytest.raises(TypeError, match=r"weight_qkwargs: observer='mse': expected a class"):
        get_default_qat_qconfig(weight_qkwargs={"observer": "mse"})


@pytest.mark.parametrize("settings", [{"dtipe": "qint8"}, {"averaging_constant": 2}])
def test_a_quantizer_of_ones_own_is_named_with_its_layer(settings) -> None:
    own = horizon.quantization.FakeQuantize.with_args(**settings)
    qconfig = torch.quantization.QConfig(activation=own, weight=QAT.weight)
    wrong = r"(.*nearest: dtype|.*expected 0 to 1)"
    with pytest.raises((TypeError, ValueError), match=rf"head\.0: {wrong}"):
        prepare_qat_fx(Net(), {"": QAT, "module_name": {"head.0": qconfig}})
    on_cpu = {"hybrid": True, "hybrid_dict": {"module_name": ["conv"]}}
    with pytest.raises((TypeError, ValueError), match=rf"node conv: {wrong}"):
        prepare_qat_fx(Net(), {"": QAT, "module_name": {"conv": qconfig}}, **on_cpu)


@pytest.mark.filterwarnings("ignore:.*has not collected:UserWarning")  # nothing runs before
def test_joining_one_tensor_is_refused_as_torch_refuses_it() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.conv = nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(torch.cat(self.conv(self.quant(x)), 1))

    x = torch.rand(2, 2, 4, 4)
    with pytest.raises(TypeError, match="must be tuple of Tensors"):
        Joined()(x)
    qat = prepare_qat_fx(Joined(), {"": QAT})
    for model in (qat, convert_fx(qat)):
        with pytest.raises(TypeError, match=r"cat_0: cat: expected a list .* of 4 axes"):
            model(x)


@pytest.mark.filterwarnings("ignore:.*has not collected:UserWarning")
def test_arithmetic_is_refused_without_a_method() -> None:
    model = nn.Sequential(QuantStub(), horizon.nn.quantized.FloatFunctional())
    model.qconfig = QAT
    qat = horizon.quantization.prepare_qat(model)
    for form in (model, qat, horizon.quantization.convert(qat)):
        name = type(form[1]).__name__
        with pytest.raises(TypeError, match=f"^{name}: call a method of it"):
            form(torch.ones(1))
