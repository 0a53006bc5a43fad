"""What the profiler sees of a run, and that it leaves models as they were."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    prepare_calibration,
    prepare_calibration_fx,
    prepare_qat,
    prepare_qat_fx,
)
from bevquant_hybrid_tools.quant_profiler import (
    END,
    check_qconfig,
    check_unfused_operations,
    compare_weights,
    featuremap_similarity,
    get_module_called_count,
    get_raw_features,
    record_calls,
    set_preserve_qat_mode,
)


class Net(nn.Module):
    """A residual block with functions, a layer in a row of two, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv = nn.Conv2d(3, 4, 1)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.add = FloatFunctional()
        self.tail = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sigmoid())

    def forward(self, x):
        x = self.relu(self.bn(self.conv(self.quant(x))))
        return self.dequant(self.tail(self.add.add(x, F.max_pool2d(x, 1))))


DATA = torch.rand(2, 3, 5, 6, generator=torch.Generator().manual_seed(3))


def forms(fx: bool) -> dict[str, nn.Module]:
    """A float model, and what it becomes, each of them trained or calibrated a little."""
    torch.manual_seed(0)
    model = Net()
    calib, qat = get_default_calib_qconfig(), get_default_qat_qconfig()
    if fx:
        calibration = prepare_calibration_fx(model, {"": calib})
        calibration(DATA)
        trained = prepare_qat_fx(calibration, {"": qat})
    else:
        model.qconfig = calib
        calibration = prepare_calibration(model)
        calibration(DATA)
        prepared = copy.deepcopy(calibration)
        prepared.qconfig = qat
        trained = prepare_qat(prepared)
    trained(DATA)
    converted = (convert_fx if fx else convert)(trained)
    return {"float": model, "calibration": calibration, "qat": trained, "converted": converted}


FORMS = ["float", "calibration", "qat", "converted"]


def state_of(model: nn.Module) -> dict:
    """Everything about a model that a look at it could change."""
    found: dict = {name: value.clone() for name, value in model.state_dict().items()}
    for path, module in model.named_modules():
        found[path, "mode"] = module.training
        found[path, "hooks"] = (len(module._forward_hooks), len(module._forward_pre_hooks))
        found[path, "own"] = sorted(map(str, module.__dict__))
        if hasattr(module, "observer_enabled"):
            found[path, "observes"] = module.observer_enabled.tolist()
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fx", [True, False])
def test_looking_changes_nothing(form: str, fx: bool, tmp_path) -> None:
    models = forms(fx)
    model = models[form]
    model.train()
    before = state_of(model)
    get_module_called_count(model, DATA, print_tabulate=False)
    get_raw_features(model, DATA)
    featuremap_similarity(model, models["qat"], DATA, out_dir=tmp_path)
    compare_weights(models["float"], model, out_dir=tmp_path)
    if form == "float":
        check_unfused_operations(model, DATA, print_tabulate=False)
    elif form != "converted":
        check_qconfig(model, DATA, out_dir=tmp_path)
    after = state_of(model)
    assert list(after) == list(before)
    for name, value in before.items():
        same = torch.equal(after[name], value) if isinstance(value, torch.Tensor) else None
        assert same or after[name] == value, name


@pytest.mark.parametrize("fx", [True, False])
def test_a_failing_run_leaves_no_trace(fx: bool) -> None:
    model = forms(fx)["qat"]
    model.train()
    before = state_of(model)
    with pytest.raises(RuntimeError):
        get_raw_features(model, torch.rand(2, 5, 4, 4))  # five channels, where three are wanted
    after = state_of(model)
    assert {k: v for k, v in after.items() if isinstance(k, tuple)} == {
        k: v for k, v in before.items() if isinstance(k, tuple)
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fx", [True, False])
def test_every_form_is_counted_alike(form: str, fx: bool) -> None:
    counts = get_module_called_count(forms(fx)[form], DATA, print_tabulate=False)
    names = ["quant", "dequant", "conv", "bn", "relu", "add", "tail.0", "tail.1"]
    assert list(counts) == names
    fused = {"bn", "relu"} if fx and form != "float" else set()
    assert counts == {name: 0 if name in fused else 1 for name in names}


def test_inputs_are_kept_as_they_were_given() -> None:
    # The ReLU writes its result into the norm's.
    calls = {call.path: call for call in record_calls(Net(), DATA)}
    assert (calls["bn"].output < 0).any()
    assert torch.equal(calls["relu"].args[0], calls["bn"].output)
    assert torch.equal(calls["relu"].output, calls["bn"].output.relu())


def test_functions_are_readers_between_operators() -> None:
    calls = record_calls(Net(), DATA)
    paths = [call.path or call.function.__name__ for call in calls]
    assert paths == ["quant", "conv", "bn", "relu", "max_pool2d", "add", "tail.0", "tail.1",
                     "dequant"]  # fmt: skip
    readers = {path: call.readers for path, call in zip(paths, calls, strict=True)}
    assert readers["relu"] == [paths.index("max_pool2d"), paths.index("add")]
    assert readers["conv"] == [paths.index("bn")]
    assert readers["dequant"] == [END]
    assert calls[paths.index("add")].sources == [paths.index("relu"), paths.index("max_pool2d")]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.same = self.conv
        self.block = nn.Sequential(nn.ReLU())
        self.block_again = self.block

    def forward(self, x):
        return self.block_again(self.block(self.same(self.conv(x))))


def test_modules_of_several_names_are_counted_under_the_first() -> None:
    with pytest.warns(UserWarning, match="is the same module as") as caught:
        counts = get_module_called_count(Twice(), DATA, print_tabulate=False)
    assert counts == {"conv": 2, "block.0": 2}
    told = [str(w.message) for w in caught]
    assert [text.split(": ")[1].split(";")[0] for text in told] == [
        "same is the same module as conv",
        "block_again is the same module as block",
    ]


def test_the_caller_says_what_one_operator_is() -> None:
    def check(module: nn.Module) -> bool:
        return type(module) is nn.Sequential

    assert get_module_called_count(Net(), DATA, check, print_tabulate=False) == {"tail": 1}


def test_a_model_that_is_one_operator_is_counted() -> None:
    counts = get_module_called_count(nn.Conv2d(3, 1, 1), DATA, print_tabulate=False)
    assert counts == {"": 1}


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cat, self.pool = FloatFunctional(), nn.AvgPool2d(1)

    def forward(self, x):
        return self.pool(input=self.cat.cat(tensors=(x, x), dim=1))


def test_tensors_given_by_keyword_are_seen() -> None:
    features = get_raw_features(ByKeyword(), DATA)
    assert [(f["module_name"], f["attr"]) for f in features] == [
        *(("cat", "input-0"), ("cat", "input-1"), ("cat", "output")),
        *(("pool", "input"), ("pool", "output")),
    ]


def test_a_name_is_not_the_start_of_another() -> None:
    model = nn.ModuleDict({name: nn.ReLU() for name in ("conv1", "conv10", "conv11")})
    assert set_preserve_qat_mode(model, prefixes=("conv1",)) == ["conv1"]
    assert set_preserve_qat_mode(model, prefixes="conv1") == ["conv1"]
    assert set_preserve_qat_mode(model, prefixes=("con",)) == ["conv1", "conv10", "conv11"]
    with pytest.warns(UserWarning, match="no module's name starts with 'fc'"):
        assert set_preserve_qat_mode(model, prefixes=("fc",)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefixes": (nn.Conv2d,)}, "prefixes: expected strings"),
        ({"types": ("conv",)}, "types: expected classes"),
    ],
)
def test_selections_of_the_wrong_kind_are_refused(arguments, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        set_preserve_qat_mode(Net(), **arguments)
