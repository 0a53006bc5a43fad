"""Batch norms fold into layers that are quantized, calibrated or trained: integers stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bevquant_fusion import fuse_conv_bn, fuse_model, fuse_sparse_conv_bn
from bevquant_qnn import (
    QuantConfig,
    QuantSparseConvolution,
    freeze,
    keep_within_ranges,
    learn_ranges,
    quantize_model,
)
from bevquant_quantizers import QuantDescriptor, TensorQuantizer, calibrate
from bevquant_sparse import WeightLayout, register_layout, use_bevquant_kernels

LAYERS = {
    "conv1d": (nn.Conv1d(4, 8, 3, groups=2), nn.BatchNorm1d(8), (2, 4, 9)),
    "conv2d": (nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), (2, 4, 6, 6)),
    "conv3d": (nn.Conv3d(4, 8, 2), nn.BatchNorm3d(8), (2, 4, 4, 4, 4)),
    "depthwise": (nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), (2, 8, 5, 5)),
    "linear": (nn.Linear(4, 8), nn.BatchNorm1d(8), (16, 4)),
    "transposed": (nn.ConvTranspose2d(4, 8, 2, stride=2), nn.BatchNorm2d(8), (2, 4, 5, 5)),
    "grouped transposed": (nn.ConvTranspose2d(4, 8, 2, groups=2), nn.BatchNorm2d(8), (2, 4, 5, 5)),
    "transposed 1d": (nn.ConvTranspose1d(4, 8, 3, groups=4), nn.BatchNorm1d(8), (2, 4, 5)),
}


def pair(kind: str, factors: str = "mixed") -> tuple[nn.Sequential, torch.Tensor]:
    """A layer, its norm with factors from 0.1 to 10, and inputs; in double, for equal bits."""
    torch.manual_seed(0)
    layer, norm, shape = copy.deepcopy(LAYERS[kind])
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    norm.weight.data.copy_(torch.logspace(-1, 1, 8) * torch.where(torch.arange(8) % 3 > 0, 1, -1))
    if factors == "positive":
        norm.weight.data.abs_()
    elif factors == "one":
        norm.running_var.fill_(1)
        norm.weight.data.fill_(-3.0)
    if factors == "mixed":
        norm.weight.data[4] = 0
    norm.bias.data.normal_()
    return nn.Sequential(layer, norm).double().eval(), torch.randn(shape, dtype=torch.float64)


def trained(model: nn.Module, x: torch.Tensor) -> None:
    """Move weights and ranges as a training does, some weights beyond their range."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("1."):
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))


def integers(layer: Any) -> torch.Tensor:
    """Integers of the weight, in the shape of the weight."""
    quantizer, weight = layer._weight_quantizer, layer.weight_to_quantize()
    amax = quantizer._get_amax(weight)
    steps = quantizer(weight) * (2 ** (quantizer.num_bits - 1) - 1) / amax
    whole = steps.nan_to_num().round()
    assert torch.allclose(steps.nan_to_num(), whole, atol=1e-3)
    return whole.reshape(layer.weight.shape)


def same(model: nn.Module, fused: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", [True, False], ids=["inputs", "structure"])
@pytest.mark.parametrize("state", ["calibrated", "frozen", "learned", "disabled"])
@pytest.mark.parametrize("kind", LAYERS)
def test_ranges_are_folded_with_their_weights(kind: str, state: str, given: bool) -> None:
    model, x = pair(kind)
    model = quantize_model(model, QuantConfig(narrow_range=True), x).model
    calibrate(model, [x])
    if state == "frozen":
        freeze(model)
    if state == "learned":
        learn_ranges(model)
        trained(model, x)
    if state == "disabled":
        model[0]._weight_quantizer.disable()
    before = copy.deepcopy(model)
    result = fuse_model(model, x if given else None)
    assert [(fold.conv, fold.bn) for fold in result.fused] == [("0", "1")]
    same(before, result.model, x)
    same(before, model, x)
    layer, old = result.model[0], before[0]
    layer._weight_quantizer.enable()
    old._weight_quantizer.enable()
    folded, wanted = integers(layer), integers(old)
    kept = folded.abs().flatten() > 0  # a factor of 0 leaves zeros
    assert torch.equal(folded.flatten().abs()[kept], wanted.flatten().abs()[kept])
    assert bool(kept.any())
    if state == "learned":
        assert layer._weight_quantizer._amax.requires_grad


@pytest.mark.parametrize("kind", LAYERS)
def test_one_pair(kind: str) -> None:
    model, x = pair(kind)
    model = quantize_model(model, example_inputs=x).model
    calibrate(model, [x])
    fused = fuse_conv_bn(model[0], model[1])
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", [True, False], ids=["inputs", "structure"])
def test_one_range_for_channels_with_different_factors_is_refused(given: bool) -> None:
    model, x = pair("conv2d")
    model = quantize_model(model, QuantConfig(weight_per_channel=False), x).model
    calibrate(model, [x])
    result = fuse_model(model, x if given else None)
    assert not result.fused
    assert "one range holds values that are multiplied by different factors" in str(result)
    same(model, result.model, x)
    with pytest.raises(ValueError, match="one range holds values"):
        fuse_conv_bn(model[0], model[1])


def test_one_range_for_channels_with_one_factor_is_folded() -> None:
    model, x = pair("conv2d", "one")
    model = quantize_model(model, QuantConfig(weight_per_channel=False), x).model
    calibrate(model, [x])
    result = fuse_model(model, x)
    assert result.fused
    same(model, result.model, x)


def test_a_range_learned_by_a_clip_is_folded() -> None:
    model, x = pair("conv2d", "one")
    model = quantize_model(model, example_inputs=x).model
    layer = model[0]
    layer._weight_quantizer = TensorQuantizer(QuantDescriptor(learn_amax=True, amax=0.2)).double()
    layer._weight_quantizer.clip.clip_value_min.data.fill_(-0.1)
    model[0]._input_quantizer.amax = 3.0
    result = fuse_model(model, x)
    assert result.fused
    same(model, result.model, x)
    model, x = pair("conv2d")
    model = quantize_model(model, example_inputs=x).model
    model[0]._weight_quantizer = layer._weight_quantizer
    assert "different factors" in str(fuse_model(model))


def test_the_lowest_integer_has_no_opposite() -> None:
    model, x = pair("conv2d")
    model = quantize_model(model, example_inputs=x).model
    calibrate(model, [x])
    model[0].weight.data[0, 0, 0, 0] = -9.0  # factor 0 is negative
    result = fuse_model(model, x)
    assert not result.fused
    assert "-128, which has no opposite" in str(result)
    keep_within_ranges(model)
    result = fuse_model(model, x)
    assert result.fused
    same(model, result.model, x)


def test_weights_above_the_range_keep_their_integer_when_the_sign_changes() -> None:
    model, x = pair("conv2d")
    model = quantize_model(model, example_inputs=x).model
    calibrate(model, [x])
    model[0].weight.data[0, 0, 0, 0] = 9.0
    model[0].weight.data[1, 0, 0, 0] = -9.0
    result = fuse_model(model, x)
    assert result.fused
    same(model, result.model, x)


def test_layers_that_share_a_weight_quantizer_are_refused() -> None:
    model, x = pair("conv2d")
    model = quantize_model(nn.Sequential(*model, nn.Conv2d(8, 8, 1).double()), None, x).model
    model[2]._weight_quantizer = model[0]._weight_quantizer
    result = fuse_model(model)
    assert "0 shares the quantizer of its weight with 2" in str(result)


def test_a_quantizer_between_layer_and_norm_is_reported() -> None:
    model, x = pair("conv2d")
    layer, norm = quantize_model(model, example_inputs=x).model
    between = nn.Sequential(layer, TensorQuantizer(QuantDescriptor(amax=2.0)), norm)
    inside = nn.Sequential(copy.deepcopy(layer), norm)
    inside[0]._output_quantizer = TensorQuantizer(QuantDescriptor(amax=2.0))
    for given in (x, None):
        result = fuse_model(between, given)
        assert not result.fused
        assert "follows 1 (TensorQuantizer)" in str(result)
        result = fuse_model(inside, given)
        assert not result.fused
        assert "_output_quantizer (TensorQuantizer)" in str(result)


@pytest.mark.parametrize("module", ["torch.ao.nn.qat.Conv2d", "foreign"])
def test_quantizers_of_others_are_reported(module: str) -> None:
    norm = nn.BatchNorm2d(4).eval()
    if module == "foreign":
        layer: Any = quantize_model(nn.Sequential(nn.Conv2d(3, 4, 1))).model[0]
        layer._weight_quantizer = nn.Identity()
    else:
        layer = torch.ao.nn.qat.Conv2d(3, 4, 1, qconfig=torch.ao.quantization.default_qat_qconfig)
    with pytest.raises(ValueError, match=r"_quant|quantizes its weight by a Identity"):
        fuse_conv_bn(layer, norm)


class Sparse(nn.Module):
    def __init__(self, layout: WeightLayout) -> None:
        super().__init__()
        shape = {WeightLayout.KRSC: (8, 3, 3, 3, 4), WeightLayout.RSCK: (3, 3, 3, 4, 8)}
        self.weight = nn.Parameter(torch.randn(shape.get(layout, (27, 4, 8))))
        self.bias, self.indice_key = None, "a"


class Krsc(Sparse): ...


class Rsck(Sparse): ...


class Vck(Sparse): ...


@pytest.mark.parametrize("cls", [Krsc, Rsck, Vck])
@pytest.mark.parametrize("learned", [False, True])
def test_sparse_layouts(cls: type[Sparse], learned: bool) -> None:
    layout = WeightLayout[cls.__name__.upper()]
    register_layout(cls, layout)
    torch.manual_seed(0)
    layer = QuantSparseConvolution(cls(layout))
    norm = nn.BatchNorm1d(8).eval()
    norm.weight.data.copy_(torch.logspace(-1, 1, 8))
    norm.weight.data[2] *= -1
    layer._input_quantizer.amax = 3.0
    layer._weight_quantizer.amax = (
        layer.weight.detach()
        .abs()
        .amax(
            [d for d in range(layer.weight.dim()) if d != layout.out_axis % layer.weight.dim()],
            True,
        )
    )
    if learned:
        learn_ranges(layer)
    fused = fuse_sparse_conv_bn(layer, norm)
    assert torch.equal(integers(fused).abs(), integers(layer).abs())
    signs = torch.sign(integers(fused) * integers(layer)).movedim(layout.out_axis, 0).flatten(1)
    assert signs[2].max() <= 0
    assert signs[[0, 1, 3, 4, 5, 6, 7]].min() >= 0
    factor = fused._weight_quantizer.amax / layer._weight_quantizer.amax
    torch.testing.assert_close(factor.flatten(), (norm.weight / (1 + 1e-5) ** 0.5).abs())


def test_where_nothing_can_be_folded_ranges_stay() -> None:
    model, x = pair("conv2d")
    model = quantize_model(model, example_inputs=x).model
    calibrate(model, [x])
    model[1].weight.data[3] = 1e308
    model[1].running_var[3] = 1e-30
    model[1].eps = 0.0
    before = model[0]._weight_quantizer.amax.clone()
    with pytest.raises(ValueError, match="not finite"):
        fuse_conv_bn(model[0], model[1])
    result = fuse_model(model)
    assert torch.equal(result.model[0]._weight_quantizer.amax, before)
    assert torch.equal(result.model[0].weight, model[0].weight)


def test_a_net_that_was_trained_with_its_norms() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 4, 1),
    ).double()
    x = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    model = quantize_model(net.train(), example_inputs=x).model
    calibrate(model.eval(), [x])
    ranges = learn_ranges(model.train())
    optimizer = torch.optim.SGD([*model.parameters()], lr=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert ranges
    model.eval()
    result = fuse_model(model, x)
    assert [fold.conv for fold in result.fused] == ["0", "3"]
    same(model, result.model, x)
    freeze(result.model)
    same(model, result.model, x)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("given", [True, False], ids=["inputs", "structure"])
def test_a_sparse_encoder(kernel: int, given: bool) -> None:
    spconv = pytest.importorskip("spconv.pytorch")
    torch.manual_seed(0)
    layer = spconv.SubMConv3d(3, 4, kernel, indice_key="a", bias=False)
    net = spconv.SparseSequential(layer, nn.BatchNorm1d(4), nn.ReLU()).eval()
    net[1].weight.data.copy_(torch.tensor([0.1, -2.0, 3.0, 0.0]))
    use_bevquant_kernels(net)
    places = torch.randint(0, 4, (30, 3), dtype=torch.int32).unique(dim=0)
    indices = torch.cat([torch.zeros(len(places), 1, dtype=torch.int32), places], 1)
    x = spconv.SparseConvTensor(torch.randn(len(places), 3), indices, [4, 4, 4], 1)
    model = quantize_model(net, example_inputs=x).model
    calibrate(model, [x])
    result = fuse_model(model, x if given else None)
    assert [(fold.conv, fold.how) for fold in result.fused] == [("0", "removed")]
    with torch.no_grad():
        made, wanted = result.model(x).features, model(x).features
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
