"""Wrappers that only treat empty batches apart are folded and quantized as torch's layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_fusion import fuse_conv_bn, fuse_model
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


class NewEmpty(torch.autograd.Function):
    """What old versions of torch needed for empty batches."""


def obsolete(version: tuple[int, ...]) -> bool:
    return version > (99,)


class Conv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0 and obsolete((1, 4)):
            sizes = [x.shape[0], self.out_channels]
            empty = NewEmpty.apply(x, sizes)
            if self.training:
                return empty + sum(x.view(-1)[0] for x in self.parameters()) * 0.0
            return empty
        return super().forward(x)


class ConvTranspose2d(nn.ConvTranspose2d):
    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0 and obsolete((1, 4)):
            return NewEmpty.apply(x, [x.shape[0], self.out_channels])
        return super().forward(x)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0 and obsolete((1, 5)):
            return NewEmpty.apply(x, [x.shape[0], self.out_features])
        return super().forward(x)


class MaxPool2d(nn.MaxPool2d):
    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0 and obsolete((1, 9)):
            return NewEmpty.apply(x, list(x.shape[:2]))
        return super().forward(x)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(
        Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        MaxPool2d(2),
        ConvTranspose2d(4, 4, 2),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        Linear(64, 5),
        nn.BatchNorm1d(5),
    )
    for module in made:
        if hasattr(module, "running_var"):
            module.running_var.uniform_(0.5, 2)
            module.running_mean.normal_()
    return made.eval()


@pytest.mark.parametrize("given", [True, False], ids=["inputs", "structure"])
def test_they_are_folded_and_quantized(given: bool) -> None:
    model, x = net(), torch.randn(4, 3, 8, 8)
    folded = fuse_model(model, x if given else None)
    assert [fold.conv for fold in folded.fused] == ["0", "4", "7"]
    torch.testing.assert_close(folded.model(x), model(x))
    result = quantize_model(folded.model, example_inputs=x if given else None)
    assert [(item.path, item.kind) for item in result.quantized] == [
        ("0", "QuantConv2d"),
        ("3", "QuantMaxPool2d"),
        ("4", "QuantConvTranspose2d"),
        ("7", "QuantLinear"),
    ]
    calibrate(result.model, [x])
    with torch.no_grad():
        wanted, made = model(x), result.model(x)
    assert float((made - wanted).square().sum() / wanted.square().sum()) < 1e-3


def test_one_pair() -> None:
    layer, norm = net()[:2]
    x: Any = torch.randn(1, 3, 5, 5)
    torch.testing.assert_close(fuse_conv_bn(layer, norm)(x), norm(layer(x)))
