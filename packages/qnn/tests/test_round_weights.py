"""Rounding by the layer's output: patches are the layer's own, errors fall, nothing else moves."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from bevquant_fusion import fuse_model
from bevquant_qnn import (
    PrecisionPlan,
    QuantConfig,
    apply_precision,
    quantize_model,
    round_weights,
)
from bevquant_qnn._round_weights import gptq
from bevquant_quantizers import (
    QuantDescriptor,
    TensorQuantizer,
    calibrate,
    format_of,
    quantization_disabled,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")

LAYERS = {
    "conv1d": (nn.Conv1d(4, 6, 3, 2, 1, dilation=2), (2, 4, 9)),
    "conv2d groups": (nn.Conv2d(4, 6, (3, 2), (1, 2), (1, 0), groups=2), (2, 4, 7, 6)),
    "conv2d reflect": (nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect"), (2, 2, 5, 6)),
    "conv3d": (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 3)),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4), (1, 4, 5, 5)),
    "linear": (nn.Linear(5, 3), (2, 7, 5)),
    "transposed": (nn.ConvTranspose2d(3, 4, 3, 2, 1, output_padding=1), (2, 3, 4, 5)),
    "transposed groups": (nn.ConvTranspose2d(4, 6, 2, 2, groups=2), (1, 4, 3, 3)),
    "transposed 1d": (nn.ConvTranspose1d(3, 2, 4, 3, 1, dilation=2), (2, 3, 6)),
}


ALL = 10**6  # patches


def alone(layer, x, weight_bits=4, **options):
    """A layer with 4-bit weights and a bias of 0, if any, whose input is not rounded."""
    layer = copy.deepcopy(layer)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    config = QuantConfig(weight_bits=weight_bits, **options)
    model = quantize_model(nn.Sequential(layer), config).model
    calibrate(model, [x])
    model[0].input_quantizer.disable()
    return model


def output_error(model, x, wanted):
    with torch.no_grad():
        made = getattr(model(x), "features", model(x))
    return float((made - wanted).double().square().sum() / wanted.double().square().sum())


def check_errors(model, x):
    """What is said of a layer's patches is so of its output, whatever its kind."""
    with quantization_disabled(model), torch.no_grad():
        wanted = getattr(model(x), "features", model(x))
    own, before = model[0].weight, output_error(model, x, wanted)
    (layer,) = round_weights(model, [x], correct_bias=False, rows=ALL).layers
    assert layer.nearest == pytest.approx(before, rel=1e-3)
    assert layer.error == pytest.approx(output_error(model, x, wanted), rel=1e-3)
    assert layer.error < layer.nearest
    assert model[0].weight is own


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_matrix_times_its_patches(name):
    torch.manual_seed(1)
    layer, shape = LAYERS[name]
    layer.reset_parameters()
    x = torch.randn(shape) + 1  # together they say more than each by itself
    check_errors(alone(layer, x), x)


@pytest.mark.parametrize("kind", ["SubMConv3d", "SparseConv3d", "1x1"])
def test_a_sparse_layer_is_its_matrix_times_its_patches(spconv, cloud, kind):
    torch.manual_seed(0)
    options = {"indice_key": "k"} if kind == "SubMConv3d" else {}
    if kind == "1x1":
        layer = spconv.SubMConv3d(4, 6, 1, bias=True)
    else:
        stride = {"stride": 2} if kind == "SparseConv3d" else {}
        layer = getattr(spconv, kind)(4, 6, 3, padding=1, bias=True, **options, **stride)
    x = cloud(4)
    x = x.replace_feature(x.features + 1)
    check_errors(alone(layer, x), x)
    assert x.indice_dict == {}


def test_patches_of_one_seed_lie_in_the_same_places():
    """A layer that loses nothing shifts nothing: the float model's patches are the quantized's."""
    torch.manual_seed(0)
    layer, x = nn.Conv2d(2, 3, 3), torch.randn(2, 2, 8, 8)
    some, every = (
        round_weights(alone(layer, x), [x], rounding="nearest", rows=rows).layers[0].nearest
        for rows in (20, ALL)
    )
    assert some != every
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-7, 8, layer.weight.shape) / 7)
        layer.weight[:, 0, 0, 0] = 1
    model = alone(layer, x)
    round_weights(model, [x], rows=20)
    assert float(model[0].bias.detach().abs().max()) < 1e-6


def test_gptq_comes_near_the_best_of_all_roundings():
    torch.manual_seed(2)
    x = torch.randn(200, 2) @ torch.randn(2, 5) + 0.25 * torch.randn(200, 5)
    hessian = (x.T @ x).double()
    moves = torch.tensor(list(itertools.product((-1, 0, 1, 2), repeat=5)))
    worse, better, best = 0.0, 0.0, 0.0
    for _ in range(20):
        layer = nn.Linear(5, 1, bias=False)
        weight = layer.weight.detach().double()
        model = alone(layer, x)
        (found,) = round_weights(model, [x], rows=ALL).layers
        step = model[0].weight_quantizer.amax.double() / 7
        lost = ((weight / step).floor() + moves).clamp(-8, 7) * step - weight
        errors = torch.einsum("ni,ij,nj->n", lost, hessian, lost) / (weight @ hessian @ weight.T)
        best += float(errors.min())
        whole = model[0].weight / step
        torch.testing.assert_close(whole, whole.round(), rtol=0, atol=1e-5)
        better += found.error
        worse += found.nearest
    assert better < 0.25 * worse
    assert better < 2.5 * best


def test_gptq_of_independent_inputs_is_rounding_to_the_nearest():
    torch.manual_seed(0)
    layer = nn.Linear(6, 3, bias=False)
    nn.init.zeros_(layer.weight[2])  # a channel without range
    step = layer.weight.detach().abs().amax(1, keepdim=True) / 127
    x = torch.tensor([1.0, 2.0, 3.0, 0.0, 0.5, 9.0]).sqrt().diag()
    model = alone(layer, x, weight_bits=8)
    round_weights(model, [x])
    nearest = (layer.weight[:2] / step[:2]).round() * step[:2]
    torch.testing.assert_close(model[0].weight[:2], nearest)
    assert not model[0].weight[2].any()


def with_outliers():
    """A layer whose largest weights meet an input that is zero but once, and its inputs."""
    torch.manual_seed(5)
    layer, x = nn.Linear(32, 6, bias=False), torch.randn(200, 32)
    with torch.no_grad():
        layer.weight[:, 0] = 3 * layer.weight.abs().max()
    x[1:, 0] = 0
    return layer, x


@pytest.mark.parametrize("per_channel", [True, False])
def test_gptq_chooses_the_range_by_the_output(per_channel):
    layer, x = with_outliers()
    model = alone(layer, x, weight_per_channel=per_channel)
    before = model[0].weight_quantizer.amax.clone()
    second = (x.T @ x).double() / len(x)
    weight = layer.weight.detach().double()
    fixed = gptq(weight, second, before.double().expand(6, 1) / 7, format_of(4)) - weight
    fixed = float(((fixed @ second) * fixed).sum() / ((weight @ second) * weight).sum())
    (found,) = round_weights(model, [x], rows=ALL).layers
    after = model[0].weight_quantizer.amax
    assert after.shape == before.shape
    assert bool((after < 0.8 * before).all())
    assert found.error < 0.6 * fixed
    with torch.no_grad():
        torch.testing.assert_close(model[0].quantized_weight(), model[0].weight)
        assert output_error(model, x, layer(x)) == pytest.approx(found.error, rel=1e-3)


@pytest.mark.parametrize("bits", [(4, 3), (5, 2)])
def test_gptq_rounds_to_fp8_numbers_with_scales_by_the_output(bits):
    torch.manual_seed(3)
    layer = nn.Conv2d(4, 6, 3)
    x = torch.randn(4, 4, 9, 9) + torch.randn(4, 1, 9, 9)
    model = alone(layer, x, weight_bits=bits)
    before = model[0].weight_quantizer.amax.clone()
    check_errors(model, x)
    quantizer = model[0].weight_quantizer
    torch.testing.assert_close(quantizer(model[0].weight), model[0].weight, rtol=1e-6, atol=0)
    assert bool((quantizer.amax != before).any())
    assert bool((quantizer.amax < 2.1 * before).all())


def test_weights_in_blocks_are_left_alone():
    model = nn.Sequential(nn.Linear(32, 4))
    x = torch.randn(8, 32)
    model = quantize_model(model, QuantConfig(), x).model
    calibrate(model, [x])
    apply_precision(model, PrecisionPlan.by_hand(model, {}, "mxfp8"))
    ((path, reason),) = round_weights(model, [x]).skipped
    assert (path, reason) == ("0", "its weight has scales by block, which follow from the values")


def test_a_range_of_several_layers_stays():
    layer, x = with_outliers()
    model = nn.Sequential(alone(layer, x)[0], nn.Linear(6, 32))
    model = quantize_model(model, QuantConfig(weight_bits=4)).model
    calibrate(model, [x])
    model.add_module("other", copy.deepcopy(model[0]))
    model.other._weight_quantizer = model[0]._weight_quantizer
    before = [model[i].weight_quantizer.amax.clone() for i in (0, 1)]
    round_weights(model, [x], forward=lambda net, batch: net[1](net[0](batch)))
    assert torch.equal(model[0].weight_quantizer.amax, before[0])
    assert not torch.equal(model[1].weight_quantizer.amax, before[1])


def test_a_chosen_range_fits_the_bias():
    layer, x = with_outliers()
    model = alone(nn.Linear(32, 6), x)
    quantizer = model[0].input_quantizer
    quantizer.enable()
    with torch.no_grad():
        model[0].weight.copy_(layer.weight)
        smallest = float(quantizer.step_size * model[0].weight_quantizer.amax.min() / 7)
        model[0].bias.fill_(0.9 * 2**30 * smallest)
    before = model[0].weight_quantizer.amax.clone()
    round_weights(model, [x])
    after = model[0].weight_quantizer.amax
    assert bool((after < before).any())
    steps = model[0].bias.detach()[:, None] / (quantizer.step_size * after / 7)
    assert float(steps.max()) <= 2**30 * (1 + 1e-6)


def test_columns_of_several_blocks_are_rounded_one_after_the_other():
    torch.manual_seed(0)
    x = torch.randn(500, 300).double() @ torch.randn(300, 300).double()
    hessian, weight = x.T @ x / 500, torch.randn(3, 300).double()
    step = weight.abs().amax(1, keepdim=True) / 7
    order = hessian.diagonal().argsort(descending=True)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(300)
    inverse = torch.linalg.inv(damped[order][:, order])
    left, wanted = weight[:, order].clone(), torch.zeros(3, 300).double()
    for i in range(300):
        wanted[:, order[i]] = (left[:, i] / step[:, 0]).round().clamp(-7, 7) * step[:, 0]
        error = (left[:, i] - wanted[:, order[i]]) / inverse[0, 0]
        left[:, i:] -= error[:, None] * inverse[0]
        inverse = (inverse - inverse[:, :1] * inverse[:1] / inverse[0, 0])[1:, 1:]
    torch.testing.assert_close(gptq(weight, hessian, step, format_of(4)), wanted)


def four_bits(net, inputs, **options):
    net.eval()
    model = quantize_model(net, QuantConfig(weight_bits=4, **options), inputs).model
    calibrate(model, [inputs])
    return model


def noise(model, exact, inputs):
    call = model if not isinstance(inputs, tuple) else lambda *x: model(*x)
    batch = inputs if isinstance(inputs, tuple) else (inputs,)
    with torch.no_grad():
        return float((call(*batch) - exact(*batch)).double().square().mean())


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_dense_net_loses_less(nets, per_channel):
    torch.manual_seed(3)
    images = torch.randn(2, 3, 64, 64)
    exact = fuse_model(nets.ResNetFPN().eval(), images).model
    net = copy.deepcopy(exact)
    model = four_bits(net, images, weight_per_channel=per_channel)

    def error():
        pairs = zip(model(images), exact(images), strict=True)
        return sum(float((q - f).square().sum()) for q, f in pairs)

    with torch.no_grad():
        before = error()
        parameters = list(model.parameters())
        result = round_weights(model, [images])
        assert error() < 0.5 * before
    assert result.skipped == ()
    assert all(layer.error <= layer.nearest for layer in result.layers)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    for module in model.modules():
        if hasattr(module, "weight_quantizer"):
            torch.testing.assert_close(
                module.quantized_weight(), module.weight, rtol=1e-5, atol=1e-7
            )
            assert not module.weight_quantizer._disabled


def test_a_sparse_net_loses_less(sparse_nets):
    torch.manual_seed(4)
    coordinates = (torch.rand(1, 16, 16, 17) < 0.1).nonzero().int()
    frame = (torch.randn(len(coordinates), 5), coordinates, 1)
    net = sparse_nets.SparseEncoder().eval()
    exact = quantize_model(net, example_inputs=frame).model
    model = quantize_model(net, QuantConfig(weight_bits=4), frame).model
    calibrate(model, [frame])
    with quantization_disabled(exact):
        before = noise(model, exact, frame)
        result = round_weights(model, [frame])
        assert noise(model, exact, frame) < 0.6 * before
    assert len(result.layers) == 21


class Short(nn.Sequential):
    """Leaves its last layer out of batches of one image."""

    def forward(self, x):
        x = self[0](x)
        return self[1](x) if len(x) > 1 else x


def test_a_batch_that_leaves_a_layer_out_is_named():
    images = torch.randn(2, 3, 6, 6)
    model = four_bits(Short(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)), images)
    with pytest.raises(ValueError, match="1 is called for the first batch and not for number 1"):
        round_weights(model, [images, images[:1]])


def test_bias_correction_makes_means_equal():
    images = torch.randn(16, 3, 8, 8) + 0.5
    exact = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3))
    net = copy.deepcopy(exact)
    model = four_bits(net, images)
    weights = [module.weight.detach().clone() for module in (model[0], model[2])]

    def shift():
        with torch.no_grad():
            return float((model(images) - exact(images)).mean((0, 2, 3)).abs().max())

    before = shift()
    result = round_weights(model, [images], rounding="nearest", rows=10**6)
    assert shift() < 1e-5
    assert before > 1e-3
    assert all(torch.equal(m.weight, w) for m, w in zip((model[0], model[2]), weights, strict=True))
    assert [layer.error for layer in result.layers] == [layer.nearest for layer in result.layers]
    untouched = four_bits(copy.deepcopy(exact), images)
    round_weights(untouched, [images], correct_bias=False)
    assert torch.equal(untouched[0].bias, exact[0].bias)


def test_biases_are_corrected_in_a_plan_of_fp8_and_float():
    images = torch.randn(16, 3, 8, 8) + 0.5
    exact = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3))
    model = four_bits(copy.deepcopy(exact), images)
    apply_precision(model, PrecisionPlan.by_hand(model, {"2": "float"}, "fp8"))
    result = round_weights(model, [images], rounding="nearest", rows=10**6)
    with torch.no_grad():
        shift = (model[0](images) - exact[0](images)).mean((0, 2, 3))
    assert float(shift.abs().max()) < 1e-5
    assert not torch.equal(model[0].bias, exact[0].bias)
    assert torch.equal(model[2].bias, exact[2].bias)
    assert [layer.path for layer in result.layers] == ["0"]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1, bias=False)

    def forward(self, x):
        return self.b(self.a(self.a(x)))


def test_what_is_left_alone_is_said():
    images = torch.randn(4, 3, 6, 6)
    model = four_bits(Twice(), images)
    result = round_weights(model, [images])
    assert [layer.path for layer in result.layers] == ["b"]
    assert result.skipped == (("a", "it is not called exactly once, so it has no one input"),)
    assert "a: left" in str(result)
    assert model.b.bias is None
    model = four_bits(Twice(), images)
    model.b.weight_quantizer.disable()
    assert round_weights(model, [images]).layers == ()


def test_bad_arguments_are_named():
    images = torch.randn(4, 3, 6, 6)
    model = four_bits(nn.Sequential(nn.Conv2d(3, 3, 1)), images)
    with pytest.raises(ValueError, match="unknown rounding 'up'"):
        round_weights(model, [images], rounding="up")
    with pytest.raises(ValueError, match="no batches"):
        round_weights(model, [])
    with pytest.raises(ValueError, match="the input of 0 is NaN"):
        round_weights(model, [images * math.nan])


def test_a_trained_net_comes_back_from_4_bit_weights(trained):
    images, _ = trained.images(12, test=False)
    held_out, _ = trained.images(32, test=True)
    exact = fuse_model(trained.resnet20(), images[:2]).model
    model = quantize_model(exact, QuantConfig(weight_bits=4), images[:2]).model
    calibrate(model, [images])
    before = noise(model, exact, held_out)
    round_weights(model, [images])
    assert noise(model, exact, held_out) < 0.4 * before


def test_a_row_of_zeros_stays_zero_whatever_the_others_are_rounded_by():
    torch.manual_seed(0)
    x, whole = torch.randn(50, 4) + 1, nn.Linear(4, 3, bias=False)
    nn.init.zeros_(whole.weight[1])
    others = nn.Linear(4, 2, bias=False)
    others.weight = nn.Parameter(whole.weight[::2].detach().clone())
    models = [alone(layer, x) for layer in (whole, others)]
    for model in models:
        (layer,) = round_weights(model, [x]).layers
        assert layer.error < layer.nearest
    assert not models[0][0].weight[1].any()
    assert torch.equal(models[0][0].weight[::2], models[1][0].weight)


def test_weights_are_rounded_in_the_range_that_was_learned():
    torch.manual_seed(3)
    x = torch.randn(8, 3)
    model = alone(nn.Linear(3, 2), x)
    learned = TensorQuantizer(QuantDescriptor(num_bits=4, amax=0.8, learn_amax=True))
    with torch.no_grad():
        learned.clip.clip_value_min.fill_(-0.35)
        learned.clip.clip_value_max.fill_(0.35)
    model[0]._weight_quantizer = learned
    round_weights(model, [x])
    steps = model[0].weight.detach() / (0.35 / 7)
    assert (steps - steps.round()).abs().max() < 1e-5
