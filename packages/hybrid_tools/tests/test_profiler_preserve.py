"""Modules that stay in QAT form when the rest is converted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn.quantized import FloatFunctional, QFunctional, Quantize
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    convert_fx,
    fuse_modules,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_qat,
    prepare_qat_fx,
)
from bevquant_hybrid_tools.quant_profiler import set_preserve_qat_mode

DATA = torch.randn(2, 3, 6, 7, generator=torch.Generator().manual_seed(7))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.add, self.relu = FloatFunctional(), nn.ReLU()
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sigmoid(), nn.AvgPool2d(2))
        self.mul, self.head = FloatFunctional(), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.quant(x)
        x = self.relu(self.add.add(self.bn(self.conv(x)), self.conv_again(x)))
        x = self.block(x)
        return self.dequant(self.head(self.mul.mul(x, x)))

    def conv_again(self, x):
        return torch.cat([x, x[:, :1]], 1)


class Eager(Net):
    def __init__(self) -> None:
        super().__init__()
        self.cat = FloatFunctional()

    def conv_again(self, x):
        return self.cat.cat([x, x[:, :1]], 1)


def prepared(fx: bool, mark=lambda model: None) -> nn.Module:
    torch.manual_seed(1)
    model = Net() if fx else Eager()
    model.eval()
    mark(model)
    out = get_default_qat_out_qconfig()
    if fx:
        qconfigs = {"": get_default_qat_qconfig(), "module_name": [("head", out)]}
        made = prepare_qat_fx(model, qconfigs)
    else:
        fuse_modules(model, ["conv", "bn", "add", "relu"], inplace=True)
        model.qconfig = get_default_qat_qconfig()
        model.head.qconfig = out
        made = prepare_qat(model)
    made.eval()(DATA)
    return made


def converted(model: nn.Module) -> nn.Module:
    return convert_fx(model) if hasattr(model, "graph") else convert(model)


def kept(model: nn.Module) -> set[str]:
    """Names of the modules that are still in QAT form."""
    return {
        path
        for path, module in model.named_modules()
        if type(module).__module__.startswith("bevquant_hybrid.nn.qat.")
        and not isinstance(module, qat.DeQuantStub)
    }


EVERYTHING = ["quant", "add", "block.0", "block.1", "block.2", "mul", "head"]


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("fx", [True, False])
def test_each_operator_computes_as_it_trained(name: str, fx: bool) -> None:
    model = prepared(fx)
    marked = set_preserve_qat_mode(model, prefixes=(name,))
    assert marked[0] == name
    made = converted(model)
    assert kept(made) == {name}
    reference = converted(prepared(fx))
    assert kept(reference) == set()
    # One operator computes otherwise: by a step of its result at most, which then travels on.
    difference = (made(DATA) - reference(DATA)).abs().max()
    assert difference < 0.02 * reference(DATA).abs().max()


@pytest.mark.parametrize("fx", [True, False])
def test_everything_preserved_is_the_qat_model(fx: bool) -> None:
    model = prepared(fx)
    expected = model(DATA)
    model.preserve_qat_mode = True
    made = converted(model)
    assert kept(made) >= set(EVERYTHING)
    torch.testing.assert_close(made(DATA), expected, rtol=1e-5, atol=1e-6)
    before = made.quant.activation_post_process.scale.clone()
    made(10 * DATA)  # what stays observes nothing any more
    assert torch.equal(made.quant.activation_post_process.scale, before)


@pytest.mark.parametrize("fx", [True, False])
def test_of_what_is_fused_the_layer_decides(fx: bool) -> None:
    by_layer = prepared(fx, lambda m: set_preserve_qat_mode(m, types=(nn.Conv2d,)))
    assert kept(converted(by_layer)) == {"add", "block.0", "head"}
    by_norm = prepared(fx, lambda m: set_preserve_qat_mode(m, types=(nn.BatchNorm2d, nn.ReLU)))
    assert kept(converted(by_norm)) == set()


@pytest.mark.parametrize("fx", [True, False])
def test_classes_of_a_qat_model(fx: bool) -> None:
    model = prepared(fx)
    assert set_preserve_qat_mode(model, types=nn.Conv2d) == ["add", "block.0", "head"]
    set_preserve_qat_mode(model, types=nn.Conv2d, value=False)
    arithmetic = set_preserve_qat_mode(model, types=(FloatFunctional,))
    assert set(arithmetic) == {"mul", "_generated_cat_0" if fx else "cat"}
    assert kept(converted(model)) == set(arithmetic)
    set_preserve_qat_mode(model, types=(FloatFunctional,), value=False)
    for kind in (nn.Sigmoid, qat.SegmentLUT):
        assert set_preserve_qat_mode(model, types=(kind,))[0] == "block.1"
    assert kept(converted(model)) == {"block.1"}


def test_a_container_speaks_for_what_it_holds() -> None:
    model = prepared(True)
    model.block.preserve_qat_mode = True
    model.block[1].preserve_qat_mode = False
    assert kept(converted(model)) == {"block.0", "block.2"}


def test_the_neighbours_are_in_fixed_point() -> None:
    model = prepared(True)
    set_preserve_qat_mode(model, ("block",))
    made = converted(model)
    assert isinstance(made.quant, Quantize)
    assert isinstance(made.mul, QFunctional)
    assert isinstance(made.block[0], qat.Conv2d)
    assert not made.training
