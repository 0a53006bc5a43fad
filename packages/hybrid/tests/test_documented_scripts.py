"""What a script written for the documents does around its model: states, messages, files."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.quantization import DeQuantStub

from bevquant_hybrid.dtype import qint8
from bevquant_hybrid.nn import Interpolate
from bevquant_hybrid.qat_mode import set_qat_mode
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.quantization import (
    FakeQuantState,
    QuantStub,
    check_model,
    convert,
    convert_fx,
    fuse_fx,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    get_default_qconfig,
    load_observer_params,
    prepare_calibration,
    prepare_calibration_fx,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)
from bevquant_hybrid.utils.onnx_helper import export_to_onnx


class Block(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, groups: int = 1) -> None:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        last = nn.Conv2d(2 * channels, channels, 1, bias=False)
        self.conv = nn.Sequential(Block(channels, 2 * channels), last, nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x)


class Net(nn.Module):
    """The shape of the quick start's network: stem, residual blocks, pool, classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 128), DeQuantStub()
        self.features = nn.Sequential(Block(3, 8), Residual(8), Block(8, 8, groups=8))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(self.quant(x))
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        return self.dequant(self.classifier(torch.flatten(x, 1)))


def trained_net() -> Net:
    """A network whose batch norms have seen what it is given."""
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for _ in range(20):
            net(images())
    return net.eval()


def images(count: int = 4) -> torch.Tensor:
    return 6 * torch.rand(count, 3, 8, 8) - 3


def calibrated(net: nn.Module, **kwargs: Any) -> nn.Module:
    model = prepare_qat_fx(copy.deepcopy(net), {"": get_default_qconfig(**kwargs)})
    model.eval()
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        for _ in range(3):
            model(images())
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    return model


def test_a_converted_model_takes_the_state_of_another() -> None:
    """As a script does that saves the converted model's parameters and loads them later."""
    net = trained_net()
    first = calibrated(net)
    kept = convert_fx(first)
    with pytest.warns(UserWarning, match="has not collected any statistics"):
        fresh = convert_fx(prepare_qat_fx(Net(), {"": get_default_qconfig()}))
    assert not fresh.load_state_dict(kept.state_dict()).missing_keys
    x = images()
    assert torch.equal(fresh(x), kept(x))
    assert not torch.equal(kept(x), torch.zeros_like(kept(x)))


@pytest.mark.parametrize("kind", ["fake_quant", "lsq", "pact"])
@pytest.mark.parametrize("way", ["load_state_dict", "load_observer_params"])
def test_calibrated_ranges_start_every_kind_of_training(kind: str, way: str) -> None:
    net = trained_net()
    source = calibrated(net)
    qconfig = get_default_qat_qconfig(activation_fake_quant=kind)
    model = prepare_qat_fx(copy.deepcopy(net), {"": qconfig}).eval()
    if way == "load_state_dict":
        model.load_state_dict(source.state_dict())
    else:
        load_observer_params(source, model)
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    x = images()
    assert torch.allclose(model(x), source(x), atol=1e-6)
    for path, module in source.named_modules():
        if path.endswith("activation_post_process") and hasattr(module, "current_scale"):
            theirs = model.get_submodule(path)
            assert torch.allclose(theirs.current_scale(), module.current_scale()), path


@pytest.mark.parametrize("mode", ["fuse_bn", "with_bn", "with_bn_reverse_fold"])
def test_messages_name_fused_layers_by_their_path(mode: str) -> None:
    set_qat_mode(mode)
    converted = convert_fx(calibrated(trained_net()))
    stem = converted.features[0][0]
    stem.weight_scale.fill_(torch.inf)
    with pytest.raises(ValueError, match=r"features\.0\.0: weight scale"):
        converted(images())


def test_a_float_layer_that_is_given_integers_is_named() -> None:
    settings = {"": get_default_qat_qconfig(), "module_name": [("features.1", None)]}
    model = prepare_qat_fx(trained_net(), settings)
    expected = r"^features\.1\.conv\.0.*Conv2d\): conv2d cannot take a QTensor.*hybrid=True"
    with pytest.raises(NotImplementedError, match=expected):
        model(images())


def test_none_for_what_shall_run_on_the_cpu_says_what_to_write() -> None:
    settings = {"": get_default_qat_qconfig(), "module_name": [("features.1", None)]}
    with pytest.raises(ValueError, match="named in hybrid_dict"):
        prepare_qat_fx(trained_net(), settings, hybrid=True)


@pytest.mark.parametrize("kind", ["qat", "calibration", "percentile", "kl"])
def test_values_that_give_no_range_are_placed(kind: str) -> None:
    net = trained_net()
    if kind == "calibration":
        model = prepare_calibration_fx(net, {"": get_default_calib_qconfig()})
    elif kind == "qat":
        model = prepare_qat_fx(net, {"": get_default_qat_qconfig()})
    else:
        model = prepare_qat_fx(net, {"": get_default_qconfig(activation_observer=kind)})
    with torch.no_grad():
        net.features[0][1].bias[0] = torch.nan
    stem = model.features[0][0]
    stem.bias = nn.Parameter(torch.full((8,), torch.nan))
    with pytest.raises(ValueError, match=r"^features\.0\.0\.activation_post_process "):
        model.eval()(images())


def test_hybrid_dict_without_hybrid_is_told() -> None:
    only = {"module_name": ["features.1"]}
    with pytest.warns(UserWarning, match="hybrid_dict says nothing without hybrid=True"):
        prepare_qat_fx(trained_net(), {"": get_default_qat_qconfig()}, hybrid_dict=only)


class TakesADictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv = QuantStub(), nn.Conv2d(3, 4, 1)
        self.dequant = DeQuantStub()

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.dequant(self.conv(self.quant(data["img"])))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_traced_model_may_take_a_dictionary(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"img": torch.rand(1, 3, 8, 8)}
    model = prepare_qat_fx(TakesADictionary(), {"": get_default_qat_qconfig()})
    model(data)
    traced = torch.jit.trace(convert_fx(model), (data,), strict=False)
    assert check_model(traced, (data,)) == 0
    assert "This model is supported!" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_that_takes_a_dictionary_is_written_as_onnx(tmp_path: Any) -> None:
    onnx = pytest.importorskip("onnx")
    data = {"img": torch.rand(1, 3, 8, 8)}
    model = prepare_qat_fx(TakesADictionary(), {"": get_default_qat_qconfig()})
    model(data)
    export_to_onnx(model, data, tmp_path / "net.onnx")
    kinds = [node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node]
    assert kinds.count("QuantizeLinear") == 3
    assert kinds.count("Conv") == 1


def test_what_scripts_import_before_torchs_own_export() -> None:
    importlib.import_module("bevquant_hybrid.utils._register_onnx_ops")


def test_a_fresh_model_takes_the_state_that_was_trained() -> None:
    model = calibrated(trained_net())
    fresh = prepare_qat_fx(Net(), {"": get_default_qconfig()})
    fresh.load_state_dict(model.state_dict())
    x = images()
    assert torch.equal(convert_fx(fresh)(x), convert_fx(model)(x))


@pytest.mark.parametrize("prepare", [prepare_qat, prepare_calibration])
def test_a_model_that_nobody_gave_a_qconfig_is_told(prepare: Any) -> None:
    with pytest.warns(UserWarning, match="no module has a qconfig, so the model stays float"):
        prepare(Net())


def test_converting_what_was_not_prepared_is_told() -> None:
    """The result of a `prepare_qat` that was not inplace is easily thrown away."""
    net = Net()
    net.qconfig = get_default_qat_qconfig()
    prepare_qat(net)
    with pytest.warns(UserWarning, match="give what prepare_qat returned"):
        convert(net)


@pytest.mark.parametrize("function", [fuse_fx, prepare_qat_fx, prepare_calibration_fx])
def test_the_two_ways_of_preparing_are_told_apart(function: Any) -> None:
    net = Net()
    net.qconfig = get_default_qat_qconfig()
    with pytest.raises(ValueError, match="pass the float model"):
        function(prepare_qat(net))


def test_integers_are_made_of_values_whose_scale_is_given() -> None:
    """As tests of single blocks hand one input to the prepared and to the converted block."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3)
    conv.qconfig = get_default_qat_qconfig()
    block = prepare_qat(nn.Sequential(conv))
    x = QTensor(20 * torch.rand(2, 3, 8, 8), torch.tensor([0.5]), qint8)
    on_grid = QTensor(x.int_repr() * 0.5, torch.tensor([0.5]), qint8)
    block(on_grid)
    converted = convert(block)
    result = converted(x)
    assert torch.equal(result.int_repr(), converted(on_grid).int_repr())
    step = result.scale.item()
    assert torch.allclose(result.dequantize(), block(on_grid).dequantize(), atol=1.01 * step)


class SharedHead(nn.Module):
    """One head for maps of several sizes, as detectors have."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.pool = nn.MaxPool2d(2)
        self.resize = Interpolate(scale_factor=1.5, recompute_scale_factor=True)
        self.head = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.quant(x)
        return self.dequant(self.head(self.resize(x))), self.dequant(self.head(self.pool(x)))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_head_that_is_shared_is_told_of_once_and_traced_in_silence(tools) -> None:
    """Its batch norm stays apart and is a depthwise convolution."""
    net = SharedHead().eval()
    check_unfused_operations = tools.quant_profiler.check_unfused_operations
    found = check_unfused_operations(net, (images(),), print_tabulate=False)
    assert found == [["head.0(shared)", "head.1(shared)", "head.2(shared)"]]
    converted = convert_fx(calibrated(net))
    traced = torch.jit.trace(converted, images())
    x = images()
    assert all(map(torch.equal, traced(x), converted(x)))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("out", [False, True])
def test_a_part_that_returns_integers_is_traced(out: bool) -> None:
    """As the first of two parts is, which hands its integers to the second."""
    kind = get_default_qat_out_qconfig() if out else get_default_qat_qconfig()
    settings = {"": get_default_qat_qconfig(), "module_name": [("1", kind)]}
    model = prepare_qat_fx(nn.Sequential(QuantStub(), nn.Conv2d(3, 4, 1)), settings)
    x = torch.rand(1, 3, 8, 8)
    model(x)
    converted = convert_fx(model)
    traced = torch.jit.trace(converted, x)
    assert torch.equal(traced(x), converted(x).int_repr())
    with pytest.raises(NotImplementedError, match="int_repr"):
        converted(x).double()


def test_a_qconfig_for_a_module_that_is_not_there_is_told_with_the_nearest() -> None:
    settings = {"": get_default_qat_qconfig(), "module_name": [("classifer", None)]}
    with pytest.warns(
        UserWarning, match=r"qconfig_dict: no module is named 'classifer'; nearest: "
    ):
        prepare_qat_fx(trained_net(), settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"": "int8"}, "'' is given 'int8': expected a qconfig"),
        ({"module_name": {"classifier": "int8"}}, "'classifier' is given 'int8'"),
        ({"module_name": ["classifier", None]}, r"expected a list of pairs like \('foo.bar'"),
        ({"module_type": nn.Conv2d}, r"expected a list of pairs like \(nn.Conv2d, qconfig"),
    ],
)
def test_what_is_no_qconfig_is_named(settings: Any, expected: str) -> None:
    with pytest.raises(TypeError, match=expected):
        prepare_qat_fx(trained_net(), settings)


def test_a_layer_that_onnx_cannot_hold_is_named(tmp_path: Any) -> None:
    pytest.importorskip("onnx")
    sixteen = get_default_qat_qconfig(dtype="qint16")
    settings = {"": get_default_qat_qconfig(), "module_name": [("features.0", sixteen)]}
    model = prepare_qat_fx(trained_net(), settings)
    model(images())
    with pytest.raises(ValueError, match=r"^features\.0\.0\.activation_post_process .*qint8"):
        export_to_onnx(model, images(), tmp_path / "net.onnx")


@pytest.mark.parametrize("kept", [True, False])
def test_qconfigs_stay_where_a_caller_wants_them(kept: bool) -> None:
    net = trained_net()
    converted = convert_fx(calibrated(net), _remove_qconfig=not kept)
    assert hasattr(converted.quant, "qconfig") == kept
    plain = nn.Sequential(QuantStub(), nn.Conv2d(3, 2, 1))
    plain.qconfig = get_default_qat_qconfig()
    qat = prepare_qat(plain)
    qat(images())
    eager = convert(qat.eval(), remove_qconfig=not kept)
    assert hasattr(eager[1], "qconfig") == kept
