from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bevquant_hybrid.qat_mode import QATMode, get_qat_mode, set_qat_mode
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    fuse_modules,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)

QAT = get_default_qat_qconfig()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
        self.up, self.bn_up = nn.ConvTranspose2d(6, 4, 2, 2), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn(self.conv(self.quant(x))))
        return self.dequant(self.bn_up(self.up(y)))


@pytest.fixture
def net() -> Net:
    model = Net()
    for bn in (model.bn, model.bn_up):
        bn.running_mean.normal_(0, 0.3)
        bn.running_var.uniform_(0.3, 2)
        nn.init.normal_(bn.weight)  # negative ones too
        nn.init.normal_(bn.bias)
    with torch.no_grad():
        model.bn.weight[0] = 0
    return model.eval()


def prepared(model: nn.Module, mode: str, traced: bool) -> nn.Module:
    set_qat_mode(mode)
    if traced:
        return prepare_qat_fx(model, {"": QAT}).eval()
    fused = fuse_modules(model, [["conv", "bn", "relu"], ["up", "bn_up"]])
    fused.qconfig = QAT
    return prepare_qat(fused).eval()


MODES = [QATMode.FuseBN, QATMode.WithBN, QATMode.WithBNReverseFold]


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_computes_the_model_and_converts_to_the_same(net, mode, traced: bool) -> None:
    x = torch.randn(2, 3, 9, 9)
    expected = net(x)
    made = prepared(net, mode, traced)
    made(x)
    set_fake_quantize(made, "validation")
    result = made(x)
    name = "ConvReLU2d" if mode == QATMode.FuseBN else "ConvBNReLU2d"
    assert type(made.conv).__name__ == name
    assert (result - expected).norm() < 0.03 * expected.norm()
    converted = convert(made)(x)
    step = made.up.activation_post_process.scale.item()
    # An input step that rounds the other way moves an output by a weight times it.
    inner = made.conv.activation_post_process.scale.item()
    gain = converted_gain(convert(made).up)
    assert (converted - result).abs().max() <= 1.01 * step + 1.01 * inner * gain


def converted_gain(layer: nn.Module) -> float:
    weight = layer.weight.float() * layer.weight_scale.view(1, -1, 1, 1)
    return weight.abs().sum((0, 2, 3)).max().item()


@pytest.mark.parametrize("mode", MODES[1:])
def test_the_batch_norm_trains_on(net, mode) -> None:
    made = prepared(net, mode, traced=True).train()
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    before = copy.deepcopy(made.conv.bn.state_dict())
    made(torch.randn(4, 3, 9, 9)).square().mean().backward()
    optimizer.step()
    after = made.conv.bn.state_dict()
    assert all(not torch.equal(before[key], after[key]) for key in before)


def test_reverse_folding_later_changes_nothing(net) -> None:
    made = prepared(net, QATMode.WithBNReverseFold, traced=True)
    x = torch.randn(2, 3, 9, 9)
    made(x)
    set_fake_quantize(made, "validation")
    values = made.quant(x)
    layer = made.conv
    weight, scale, bias = layer.fixed_weight()
    folded = torch.nn.functional.conv2d(
        values.dequantize(), weight.int_repr() * scale.view(-1, 1, 1, 1), bias
    )
    torch.testing.assert_close(layer.compute(values.dequantize())[0], folded, rtol=1e-4, atol=1e-4)


def test_a_calibrated_model_keeps_its_batch_norm(net) -> None:
    set_qat_mode(QATMode.WithBN)
    x = torch.randn(2, 3, 9, 9)
    calibrated = prepare_calibration_fx(net, {"": get_default_calib_qconfig()}).eval()
    torch.testing.assert_close(calibrated(x), net(x))
    made = prepare_qat_fx(calibrated, {"": QAT})
    assert made.conv.bn.weight is net.bn.weight


def test_modes_go_by_their_names() -> None:
    set_qat_mode("with_bn")
    assert get_qat_mode() == QATMode.WithBN
    with pytest.raises(ValueError, match=r"'bn'.*fuse_bn, with_bn, with_bn_reverse_fold"):
        set_qat_mode("bn")
