"""Names that clients call, each by what a public document or public client code says of it."""

from __future__ import annotations

import importlib.metadata
import math
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.quantization import DeQuantStub

import bevquant_hybrid as horizon
from bevquant_hybrid import nn as hnn
from bevquant_hybrid.dtype import qinfo, qint4
from bevquant_hybrid.fx.jit_scheme import Tracer
from bevquant_hybrid.march import March, get_march, set_march
from bevquant_hybrid.quantization import (
    FakeQuantState,
    PrepareMethod,
    QconfigSetter,
    QuantStub,
    check_model,
    compile_model,
    convert,
    convert_fx,
    fuse_fx,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    get_default_qconfig,
    get_qconfig,
    prepare,
    prepare_qat,
    prepare_qat_fx,
    qint8,
    qint16,
    set_fake_quantize,
)
from bevquant_hybrid.quantization.fx.graph_module import (
    GraphModuleWithAttr,
    ObservedGraphModule,
    QuantizedGraphModule,
)
from bevquant_hybrid.quantization.observer_v2 import MinMaxObserver, MSEObserver
from bevquant_hybrid.quantization.qconfig_setter import (
    ConvDtypeTemplate,
    MatmulDtypeTemplate,
    ModuleNameTemplate,
)
from bevquant_hybrid.quantization.qconfig_template import (
    ModuleNameQconfigSetter,
    calibration_8bit_weight_16bit_act_qconfig_setter,
    default_calibration_qconfig_setter,
    default_qat_fixed_act_qconfig_setter,
    default_qat_fixed_qconfig_setter,
    default_qat_qconfig_setter,
    qat_8bit_weight_16bit_act_qconfig_setter,
    qat_8bit_weight_16bit_fixed_act_qconfig_setter,
)
from bevquant_hybrid.runtime import load
from bevquant_hybrid.stand_in import stand_in


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(self.quant(x))))
        return self.dequant(self.fc(torch.flatten(self.pool(x), 1)))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def types(model: nn.Module) -> dict[str, str]:
    return {
        name.removesuffix(".activation_post_process"): str(module.dtype)
        for name, module in model.named_modules()
        if type(module).__name__ == "FakeQuantize"
    }


@pytest.mark.parametrize("march", ["nash-e", "nash-m", "nash-p"])
def test_marches_of_journey_6(march: str, x: Tensor, tools, tmp_path, capsys) -> None:
    """`set_march(march)` with a string, "nash-p" by default."""
    set_march(march)
    assert get_march() == march == getattr(March, march.replace("-", "_").upper())
    qat = prepare(Net().eval(), (x,), default_calibration_qconfig_setter)
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    qat(x)
    converted = convert_fx(qat)
    assert check_model(converted, x) == 0
    said = capsys.readouterr().out
    assert "its limits on NASH" in said
    assert "This model is supported" not in said  # nobody here knows
    compile_model(converted, [x], hbm=tmp_path / "net.hbm")
    assert torch.equal(load(tmp_path / "net.hbm")(x), converted(x))
    with pytest.raises(ValueError, match="public figures of these alone"):
        tools.performance.load_chip_figures(march)


def test_limits_of_nash_that_are_public_are_checked() -> None:
    """torch.abs: "Type: int8, int16"."""
    from bevquant_hybrid.operators import OperatorCall, find_violations

    call = OperatorCall("abs", "torch.abs", {}, ((1, 2),), ("qint32",), (1, 2))
    found = find_violations([call], "nash-e")
    assert found
    assert all("dtype" in violation.constraint for violation in found)


def test_prepare_with_templates(x: Tensor) -> None:
    """A template for outputs, then what convolutions and products read: the last one wins."""
    set_march(March.NASH_E)
    setter = QconfigSetter(
        get_qconfig(observer=MSEObserver),
        templates=[
            ModuleNameTemplate({"": qint16}),
            ConvDtypeTemplate(input_dtype=qint8, weight_dtype=qint8),
            MatmulDtypeTemplate(input_dtypes=[qint8, qint8]),
        ],
    )
    qat = prepare(Net().eval(), (x,), qconfig_setter=setter)
    found = types(qat)
    assert found["conv"] == "qint16"
    assert found["quant"] == found["pool"] == found["conv.weight_fake_quant"] == "qint8"
    assert type(qat.conv.activation_post_process.activation_post_process) is MSEObserver
    assert not qat.conv.activation_post_process.observed  # the run was not observed
    later = QconfigSetter(
        reference_qconfig=get_qconfig(observer=MinMaxObserver, fix_scale=True),
        templates=[ConvDtypeTemplate(), ModuleNameTemplate({"": qint16, "fc": {"output": qint8}})],
        enable_optimize=True,
        save_dir="./qconfig_setting",
        custom_qconfig_mapping={"pool": get_qconfig(out_dtype=qint8)},
    )
    found = types(prepare(Net().eval(), x, later, PrepareMethod.JIT))
    assert (found["quant"], found["fc"], found["pool"]) == ("qint16", "qint8", "qint8")


def test_several_setters_and_what_is_refused(x: Tensor) -> None:
    """Several setters are taken, "优先级从高到低": from high priority to low."""
    setters = (
        ModuleNameQconfigSetter({"fc": get_default_qat_out_qconfig()}),
        default_qat_fixed_qconfig_setter,
    )
    qat = prepare(Net().eval(), (x,), setters)
    assert qat.fc.activation_post_process is None
    assert qat.conv.activation_post_process.activation_post_process.averaging_constant == 0
    with pytest.raises(ValueError, match="expected example_inputs"):
        prepare(Net(), qconfig_setter=setters)
    with pytest.raises(TypeError, match="expected a QconfigSetter"):
        prepare(Net(), x, get_qconfig())
    with pytest.raises(ValueError, match="float16 has no"):
        ModuleNameTemplate({"": torch.float16})
    with pytest.raises(ValueError, match="'threshold'"):
        ModuleNameTemplate({"quant": {"dtype": qint8, "threshold": 1.0}})
    with pytest.raises(ValueError, match="in_dtype"):
        get_qconfig(in_dtype=qint16)
    eager = Net().eval()
    eager.qconfig = get_qconfig()
    assert type(prepare(eager, x, method=PrepareMethod.EAGER)) is Net


@pytest.mark.parametrize(
    ("setter", "dtype", "constant"),
    [
        (default_calibration_qconfig_setter, "qint8", 0.01),
        (default_qat_qconfig_setter, "qint8", 0.01),
        (default_qat_fixed_act_qconfig_setter, "qint8", 0),
        (calibration_8bit_weight_16bit_act_qconfig_setter, "qint16", 0.01),
        (qat_8bit_weight_16bit_act_qconfig_setter, "qint16", 0.01),
        (qat_8bit_weight_16bit_fixed_act_qconfig_setter, "qint16", 0),
    ],
)
def test_the_basic_templates(setter: object, dtype: str, constant: float, x: Tensor) -> None:
    """Calibration, QAT, and QAT with fixed scales of activations; of 8 bits, and of 16."""
    set_march(March.NASH_M)
    qat = prepare(Net().eval(), x, setter)
    found = types(qat)
    assert (found["conv"], found["conv.weight_fake_quant"]) == (dtype, "qint8")
    assert qat.conv.activation_post_process.activation_post_process.averaging_constant == constant


def test_weights_of_four_bits(x: Tensor) -> None:
    setter = QconfigSetter(get_qconfig(), [ConvDtypeTemplate(weight_dtype=qint4)])
    assert (qinfo(qint4).min, qinfo(qint4).max) == (-8, 7)
    set_march(March.NASH_M)
    qat = prepare(Net().eval(), x, setter)
    qat(x)
    converted = convert_fx(qat)
    assert converted.conv.weight.abs().max() <= 8
    assert float((converted(x) - qat.eval()(x)).detach().abs().max()) < 0.02
    set_march(March.BAYES)
    with pytest.raises(ValueError, match="of qint4 on Journey 6"):
        convert_fx(qat)


def test_a_dynamic_block_takes_the_module_whose_forward_it_is_in(x: Tensor) -> None:
    """ "第一个参数传 self, 不要传 function"."""

    class Looped(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.quant(x)
            for _ in range(2):
                with Tracer.dynamic_block(self, "AddOne"):
                    y = y + 1
            return self.dequant(y)

    qat = prepare_qat_fx(Looped(), {"": get_default_qat_qconfig()})
    assert sum("add_scalar" in name for name in qat._modules) == 2
    with pytest.raises(TypeError, match=r"expected the module whose forward"):
        Tracer.dynamic_block(math.sqrt, "SubOne").__enter__()


def test_grid_sample_reads_beside_each_point() -> None:
    """Clients subtract each point's own coordinates, and quantize with 1/512 in 16 bits."""

    class Warp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = QuantStub(), DeQuantStub()
            self.points = QuantStub(1 / 512)
            self.grid_sample = hnn.GridSample(mode="bilinear", padding_mode="zeros")

        def forward(self, x: Tensor, points: Tensor) -> Tensor:
            return self.dequant(self.grid_sample(self.quant(x), self.points(points)))

    x = torch.rand(1, 2, 4, 4)
    still = torch.zeros(1, 4, 4, 2)
    assert torch.allclose(Warp()(x, still), x, atol=1e-6)
    down = torch.tensor([0.0, 1.0]).expand(1, 4, 4, 2)
    assert torch.allclose(Warp()(x, down)[:, :, :3], x[:, :, 1:], atol=1e-6)
    settings = {
        "": get_default_qat_qconfig(),
        "module_name": {"points": get_default_qat_qconfig(dtype="qint16")},
    }
    qat = prepare_qat_fx(Warp(), settings)
    between = torch.randn(1, 4, 4, 2)
    qat(x, between)
    qat.eval()
    step = float(qat.quant.activation_post_process.scale)
    assert float((qat(x, between) - Warp()(x, between)).abs().max()) <= 4 * step
    converted = convert_fx(qat)
    assert float((converted(x, between) - qat(x, between)).abs().max()) <= 1.01 * step
    learned = between.clone().requires_grad_()
    Warp()(x, learned).sum().backward()
    assert learned.grad is not None
    with pytest.raises(ValueError, match="'bilinear' or"):
        hnn.GridSample(mode="bicubic")


def test_rms_norm(x: Tensor) -> None:
    norm = hnn.RMSNorm(8, eps=1e-6)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    model = nn.Sequential(QuantStub(), norm, DeQuantStub())
    qat = prepare_qat_fx(model, {"": get_default_qat_qconfig()})
    qat(x)
    qat.eval()
    step = float(qat.get_submodule("1").activation_post_process.scale)
    with torch.no_grad():
        assert float((qat(x) - model(x)).abs().max()) <= 4 * step
        assert float((convert_fx(qat)(x) - qat(x)).abs().max()) <= 1.01 * step


def test_prepare_qat_takes_example_inputs_and_verbose(x: Tensor, capsys) -> None:
    model = Net().eval()
    model.qconfig = get_default_qat_qconfig()
    qat = prepare_qat(model, example_inputs=(x,), verbose=1)
    assert "prepare_qat: conv is a Conv2d" in capsys.readouterr().out
    assert not qat.conv.activation_post_process.observed  # the run was not observed
    with pytest.raises(RuntimeError):
        prepare_qat(model, example_inputs=(x[:, :1],))


def test_the_older_form_of_default_qconfigs() -> None:
    """get_default_qat_qconfig(bits=8, backend="") and get_default_qat_out_qconfig(bits=8, …)."""
    for made in (
        get_default_qat_qconfig(16, ""),
        get_default_qat_qconfig(bits=16, backend=""),
        get_default_qat_qconfig(16, backend=""),
    ):
        assert made.activation().dtype == "qint16"
        assert made.weight().dtype == "qint8"
    for made in (get_default_qat_out_qconfig(8, ""), get_default_qat_out_qconfig(bits=8)):
        assert made.activation is None
        assert made.weight().dtype == "qint8"
    with pytest.raises(ValueError, match="bits=7: expected 8 or 16"):
        get_default_qat_out_qconfig(7)


def test_the_types_of_graph_modules(x: Tensor) -> None:
    """fuse_fx, prepare_qat_fx -> ObservedGraphModule, convert_fx -> QuantizedGraphModule."""
    qat = prepare_qat_fx(Net().eval(), {"": get_default_qat_qconfig()})
    qat(x)
    fused = fuse_fx(Net().eval())
    assert isinstance(fused, GraphModuleWithAttr)
    assert not isinstance(fused, ObservedGraphModule | QuantizedGraphModule)
    assert isinstance(qat, ObservedGraphModule)
    assert isinstance(convert_fx(qat), QuantizedGraphModule)
    assert isinstance(convert(qat.eval()), QuantizedGraphModule)


def test_argmax_at_top_level(x: Tensor) -> None:
    assert torch.equal(horizon.argmax(x, dim=1), x.argmax(1))


def test_observers_of_weights_that_have_one_range_say_why_not() -> None:
    per_channel = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0}
    with pytest.raises(ValueError, match=r"one histogram, of the whole weight.*per channel"):
        get_default_qconfig(weight_observer="kl", weight_qkwargs=per_channel)
    with pytest.raises(ValueError, match=r"ranges of weights are per channel.*scale"):
        get_default_qconfig(weight_observer="fixed_scale")
    made = get_default_qconfig(weight_observer="fixed_scale", weight_qkwargs={"scale": 0.5})
    assert float(made.weight().scale) == 0.5
    get_default_qconfig(weight_observer="kl")


def test_distribution_metadata_while_the_stand_in_is_active(monkeypatch) -> None:
    """Scripts ask importlib.metadata for the version of the package that they import."""
    name = "horizon_plugin_pytorch"
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)
    finders = [f for f in sys.meta_path if getattr(f, "name", "") == name]
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f not in finders])
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(name)
    stand_in(name)
    assert importlib.metadata.version(name) == horizon.__version__
    assert importlib.metadata.metadata("horizon-plugin-pytorch")["Name"] == name
    listed = [d.metadata["Name"] for d in importlib.metadata.distributions()]
    assert listed.count(name) == 1
    assert "torch" in listed
    for added in set(sys.modules) - before:
        if added.partition(".")[0] == name:
            del sys.modules[added]
