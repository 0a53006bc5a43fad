"""Idioms of public client code, in this project's own words: import, fuse, prepare, convert."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.quantization import DeQuantStub
from torch.utils.checkpoint import checkpoint

from bevquant_hybrid.nn.quantized import FloatFunctional
from bevquant_hybrid.quantization import (
    FakeQuantState,
    QuantStub,
    convert,
    convert_fx,
    fuse_known_modules,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)


class ConvBlock(nn.Sequential):
    """A Sequential with a forward of its own that asks the environment what to do."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, acts: bool = True) -> None:
        parts = [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs)]
        self.parts = [*parts, nn.ReLU(inplace=True)] if acts else parts
        super().__init__(*self.parts)
        self.saved = None

    def forward(self, x: Tensor) -> Tensor:
        if bool(int(os.environ.get("CHECKPOINT", "0"))) and torch.is_tensor(x):
            return checkpoint(super().forward, x)
        if self.saved is not None and self.training:
            return self.saved(x)
        return super().forward(x)

    def fuse_model(self) -> None:
        names = ["0", "1", "2"][: len(self.parts)]
        torch.quantization.fuse_modules(self, names, inplace=True, fuser_func=fuse_known_modules)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            ConvBlock(width, width, 1), ConvBlock(width, width, 1, acts=False)
        )
        self.short_add, self.relu = FloatFunctional(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.short_add.add(self.conv(x), x))

    def fuse_model(self) -> None:
        self.conv[0].fuse_model()
        torch.quantization.fuse_modules(
            self,
            ["conv.1.0", "conv.1.1", "short_add", "relu"],
            inplace=True,
            fuser_func=fuse_known_modules,
        )


class Backbone(nn.Module):
    """Stages in lists, outputs in a list of which one is replaced, a flattened top."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.quant, self.dequant, self.classes = QuantStub(), DeQuantStub(), classes
        self.mod1 = nn.Sequential(ConvBlock(3, 8, 2), nn.MaxPool2d(3, 2, 1))
        self.mod2 = nn.Sequential(Residual(8), Residual(8))
        self.output = nn.Sequential(nn.AvgPool2d(4), nn.Conv2d(8, classes, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        maps = []
        x = self.quant(x)
        for module in [self.mod1, self.mod2]:
            x = module(x)
            maps.append(x)
        maps[0] = F.interpolate(maps[0], scale_factor=2, mode="bilinear")
        x = self.dequant(self.output(x))
        return x.view(-1, self.classes), self.dequant(maps)

    def fuse_model(self) -> None:
        for stage in [self.mod1, self.mod2]:
            for module in stage:
                if hasattr(module, "fuse_model"):
                    module.fuse_model()

    def set_qconfig(self) -> None:
        self.qconfig = get_default_qat_qconfig()
        self.output[1].qconfig = get_default_qat_out_qconfig()


@pytest.mark.parametrize("flow", ["eager", "fx", "hybrid"])
def test_a_backbone_of_lists_and_sequential_subclasses(flow: str) -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 3, 16, 16)
    model = Backbone().eval()
    expected = model(x)
    model.set_qconfig()
    if flow == "eager":
        model.fuse_model()
        qat = prepare_qat(model)
    else:
        qat = prepare_qat_fx(model, hybrid=flow == "hybrid")
    qat(x)
    qat.eval()
    set_fake_quantize(qat, FakeQuantState.CALIBRATION)
    with torch.no_grad():
        top, maps = qat(x)
        assert torch.allclose(top, expected[0], atol=1e-5)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(maps, expected[1], strict=True))
        set_fake_quantize(qat, FakeQuantState.VALIDATION)
        converted = convert(qat) if flow == "eager" else convert_fx(qat)
        for got, trained in zip(
            [converted(x)[0], *converted(x)[1]], [qat(x)[0], *qat(x)[1]], strict=True
        ):
            assert got.shape == trained.shape
            assert float((got - trained).abs().max()) <= 0.03 * float(trained.abs().max())
