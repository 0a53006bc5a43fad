"""Dense modules against float64 arithmetic, torch's own padding, and pytorch-quantization."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bevquant_qnn as qnn
from bevquant_quantizers import QuantDescriptor, quantization_disabled

# (name, arguments, input shape, functional): every dense class with a weight.
WEIGHTED = {
    "Conv1d": ((4, 6, 3), {"stride": 2, "padding": 1, "groups": 2}, (2, 4, 11)),
    "Conv2d": ((4, 6, 3), {"padding": 1, "dilation": 2}, (2, 4, 9, 8)),
    "Conv3d": ((2, 3, (3, 1, 2)), {"bias": False}, (2, 2, 5, 4, 6)),
    "ConvTranspose1d": ((4, 6, 3), {"stride": 2, "output_padding": 1}, (2, 4, 7)),
    "ConvTranspose2d": ((4, 6, 3), {"stride": 2, "padding": 1}, (2, 4, 5, 6)),
    "ConvTranspose3d": ((2, 3, 2), {"bias": False}, (1, 2, 3, 4, 3)),
    "Linear": ((5, 7), {}, (3, 2, 5)),
}
POOLS = {
    "MaxPool1d": ((2,), {}, (2, 3, 9)),
    "MaxPool2d": ((3, 2, 1), {}, (2, 3, 9, 8)),
    "MaxPool3d": ((2,), {}, (1, 2, 4, 5, 6)),
    "AvgPool1d": ((2,), {"padding": 1}, (2, 3, 9)),
    "AvgPool2d": ((3, 2), {"ceil_mode": True}, (2, 3, 9, 8)),
    "AvgPool3d": ((2,), {}, (1, 2, 4, 5, 6)),
    "AdaptiveAvgPool1d": ((3,), {}, (2, 3, 9)),
    "AdaptiveAvgPool2d": (((2, 3),), {}, (2, 3, 9, 8)),
    "AdaptiveAvgPool3d": ((2,), {}, (1, 2, 4, 5, 6)),
}


def _pair(name):
    args, kwargs, shape = (WEIGHTED | POOLS)[name]
    float_module = getattr(nn, name)(*args, **kwargs)
    return float_module, getattr(qnn, f"Quant{name}")(*args, **kwargs), shape


def _channel_amax(weight, axis):
    axes = tuple(i for i in range(weight.ndim) if i != axis)
    return np.abs(weight).max(axis=axes, keepdims=True)


@pytest.mark.parametrize("name", WEIGHTED)
def test_forward_is_the_float_module_on_quantized_operands(name, reference):
    float_module, module, shape = _pair(name)
    module.load_state_dict(float_module.state_dict())
    x = torch.randn(shape)
    weight = float_module.weight.detach().numpy()
    axis = 1 if "Transpose" in name else 0
    oracle = copy.deepcopy(float_module).double()
    oracle.weight.data = torch.from_numpy(reference(weight, _channel_amax(weight, axis)))
    expected = oracle(torch.from_numpy(reference(x.numpy(), x.abs().max().item())))
    torch.testing.assert_close(module(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", POOLS)
def test_pooling_is_the_float_module_on_quantized_input(name, reference):
    float_module, module, shape = _pair(name)
    x = torch.randn(shape)
    expected = float_module(torch.from_numpy(reference(x.numpy(), x.abs().max().item())))
    torch.testing.assert_close(module(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_max_pool_returns_indices_too():
    values, indices = qnn.QuantMaxPool2d(2, return_indices=True)(torch.randn(1, 1, 4, 4))
    assert values.shape == indices.shape == (1, 1, 2, 2)
    assert indices.dtype == torch.int64


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-600, 600), min_size=1, max_size=40), st.integers(-3, 3))
def test_rounding_is_half_to_even_and_clamps(quarters, exponent):
    # Multiples of a quarter step: every tie occurs, and all of it is exact in float32.
    scale = 2.0**exponent
    layer = qnn.QuantLinear(1, 1, bias=False, quant_desc_weight=QuantDescriptor(amax=127.0))
    layer.input_quantizer.amax = 127.0 * scale
    layer.weight.data.fill_(1.0)
    x = torch.tensor(quarters, dtype=torch.float32).unsqueeze(1) / 4 * scale
    expected = [max(-128, min(127, round(q / 4))) * scale for q in quarters]
    assert layer(x).squeeze(1).tolist() == expected


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_padding_mode_pads_the_quantized_input(mode, rank, reference):
    conv = getattr(nn, f"Conv{rank}d")(2, 3, 3, padding=1, padding_mode=mode)
    module = getattr(qnn, f"QuantConv{rank}d").from_float(copy.deepcopy(conv))
    x = torch.randn(1, 2, *[6] * rank)
    quantized = torch.from_numpy(reference(x.numpy(), x.abs().max().item()))
    padded = F.pad(quantized, [1, 1] * rank, "constant" if mode == "zeros" else mode)
    weight = conv.weight.detach().numpy()
    weight = torch.from_numpy(reference(weight, _channel_amax(weight, 0)))
    expected = getattr(F, f"conv{rank}d")(padded, weight, conv.bias.double())
    torch.testing.assert_close(module(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_grouped_transposed_weight_has_one_range_per_output_channel(rank, reference):
    conv = getattr(nn, f"ConvTranspose{rank}d")(4, 6, 2, groups=2)
    # Each output channel in a range of its own, so that a shared range would show.
    grouped = conv.weight.data.view(2, 2, 3, *[2] * rank)
    grouped *= torch.tensor([1.0, 10, 100, 0.1, 0.01, 1000]).view(2, 1, 3, *[1] * rank)
    module = getattr(qnn, f"QuantConvTranspose{rank}d").from_float(copy.deepcopy(conv))
    expected = np.empty(conv.weight.shape)
    weight = conv.weight.detach().numpy()
    for group in range(2):
        rows = slice(2 * group, 2 * group + 2)
        for channel in range(3):
            own = weight[rows, channel]
            expected[rows, channel] = reference(own, np.abs(own).max())
    got = module.quantized_weight().detach().double()
    torch.testing.assert_close(got, torch.from_numpy(expected), rtol=1e-6, atol=0.0)
    assert module(torch.randn(1, 4, *[3] * rank)).shape[1] == 6


def test_transposed_output_size_is_honoured():
    module = qnn.QuantConvTranspose2d(2, 3, 3, stride=2, padding=1)
    assert module(torch.randn(1, 2, 4, 4), output_size=[8, 8]).shape == (1, 3, 8, 8)


@pytest.mark.parametrize("name", WEIGHTED)
def test_from_float_takes_over_the_module_itself(name):
    float_module, _, shape = _pair(name)
    float_module.eval().double()
    calls = []
    handle = float_module.register_forward_hook(lambda *_: calls.append(1))
    module = getattr(qnn, f"Quant{name}").from_float(float_module)
    assert module.weight is float_module.weight
    assert module.bias is float_module.bias
    assert not module.training
    assert not module.input_quantizer.training
    assert module(torch.randn(shape, dtype=torch.float64)).dtype == torch.float64
    assert calls == [1]
    handle.remove()
    module(torch.randn(shape, dtype=torch.float64))
    assert calls == [1]
    assert not [n for n in float_module._modules if "quantizer" in n]


@pytest.mark.parametrize("name", [*WEIGHTED, *POOLS])
def test_state_dict_keys_are_upstreams(name, upstream):
    args, kwargs, shape = (WEIGHTED | POOLS)[name]
    theirs = getattr(upstream.nn, f"Quant{name}")(*args, **kwargs)
    ours = getattr(qnn, f"Quant{name}")(*args, **kwargs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs._input_quantizer.amax = 1.5
    if name in WEIGHTED:
        theirs._weight_quantizer.amax = 1.5
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(shape)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*WEIGHTED, *POOLS])
def test_same_numbers_as_upstream(name, upstream):
    args, kwargs, shape = (WEIGHTED | POOLS)[name]
    descriptor = upstream.tensor_quant.QuantDescriptor
    axis = (1 if "Transpose" in name else 0) if name in WEIGHTED else None
    extra = {"quant_desc_weight": descriptor(axis=axis)} if name in WEIGHTED else {}
    theirs = getattr(upstream.nn, f"Quant{name}")(*args, **kwargs, **extra)
    ours = getattr(qnn, f"Quant{name}")(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(shape)
    assert torch.equal(ours(x), theirs(x))


def test_checkpoint_of_an_upstream_model_loads(upstream):
    theirs = nn.Sequential(
        upstream.nn.QuantConv2d(3, 4, 3), upstream.nn.QuantConvTranspose2d(4, 2, 2)
    )
    theirs[0]._weight_quantizer.amax = [[[[0.1]]], [[[0.2]]], [[[0.3]]], [[[0.4]]]]
    theirs[0]._input_quantizer.amax = 2.0
    # Upstream's default axis of a transposed weight is 0, the input channels.
    theirs[1]._weight_quantizer.amax = [[[[0.1]]], [[[0.2]]], [[[0.3]]], [[[0.4]]]]
    ours = nn.Sequential(qnn.QuantConv2d(3, 4, 3), qnn.QuantConvTranspose2d(4, 2, 2))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, 5, 5)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)


def test_grouped_transposed_ranges_of_the_stored_shape_are_used_as_they_stand(upstream):
    theirs = upstream.nn.QuantConvTranspose2d(4, 6, 2, groups=2)
    theirs._weight_quantizer.amax = [[[[0.1]]], [[[0.2]]], [[[0.3]]], [[[0.4]]]]
    ours = qnn.QuantConvTranspose2d(4, 6, 2, groups=2)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 4, 3, 3)
    assert torch.equal(ours(x), theirs(x))


def test_constructor_takes_descriptors():
    conv = qnn.QuantConv2d(
        2,
        3,
        1,
        quant_desc_input=QuantDescriptor(num_bits=4, calib_method="histogram"),
        quant_desc_weight=QuantDescriptor(axis=None),
    )
    assert conv.input_quantizer.num_bits == 4
    assert conv.weight_quantizer.axis is None


def test_repr_is_the_listings():
    conv = qnn.QuantConv2d(64, 64, 1, quant_desc_input=QuantDescriptor(calib_method="histogram"))
    assert repr(conv).splitlines() == [
        "QuantConv2d(",
        "  64, 64, kernel_size=(1, 1), stride=(1, 1)",
        "  (_input_quantizer): TensorQuantizer(8bit fake per-tensor amax=dynamic "
        "calibrator=HistogramCalibrator scale=1.0 quant)",
        "  (_weight_quantizer): TensorQuantizer(8bit fake axis=0 amax=dynamic "
        "calibrator=MaxCalibrator scale=1.0 quant)",
        ")",
    ]


def test_wrong_input_is_refused_by_name():
    with pytest.raises(TypeError, match=r"QuantConv2d.from_float expects Conv2d, got Linear"):
        qnn.QuantConv2d.from_float(nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"QuantMaxPool2d.from_float expects MaxPool2d"):
        qnn.QuantMaxPool2d.from_float(nn.AvgPool2d(2))
    with pytest.raises(ValueError, match="quant_desc_input has fake_quant=False"):
        qnn.QuantLinear(1, 1, quant_desc_input=QuantDescriptor(fake_quant=False))


def test_learned_range_gets_a_gradient():
    layer = qnn.QuantLinear(4, 2, quant_desc_input=QuantDescriptor(amax=1.0, learn_amax=True))
    layer(3 * torch.randn(16, 4)).square().sum().backward()
    clip = layer.input_quantizer.clip
    assert clip.clip_value_max.grad.abs().item() > 0
    assert layer.weight.grad.abs().sum().item() > 0


def test_defaults_of_a_class_are_those_of_modules_built_from_then_on(upstream, monkeypatch):
    for cls in (qnn.QuantConv2d, qnn.QuantMaxPool2d):
        monkeypatch.setattr(cls, "default_quant_desc_input", None)
    monkeypatch.setattr(qnn.QuantConv2d, "default_quant_desc_weight", None)
    before = qnn.QuantConv2d(3, 4, 1)
    for library, conv in ((upstream.nn, upstream.nn.QuantConv2d), (None, qnn.QuantConv2d)):
        descriptor = upstream.tensor_quant.QuantDescriptor if library else QuantDescriptor
        kept = conv.default_quant_desc_input, conv.default_quant_desc_weight
        try:
            conv.set_default_quant_desc_input(descriptor(num_bits=6, calib_method="histogram"))
            conv.set_default_quant_desc_weight(descriptor(num_bits=4, axis=(0,)))
            layer = conv(3, 4, 1)
        finally:
            conv.default_quant_desc_input, conv.default_quant_desc_weight = kept
        assert type(layer._input_quantizer._calibrator).__name__ == "HistogramCalibrator"
        assert (layer._input_quantizer.num_bits, layer._weight_quantizer.num_bits) == (6, 4)
    assert before._input_quantizer.num_bits == 8
    qnn.QuantMaxPool2d.set_default_quant_desc_input(QuantDescriptor(num_bits=5))
    assert qnn.QuantMaxPool2d(2)._input_quantizer.num_bits == 5
    assert qnn.QuantMaxPool2d(2, quant_desc_input=QuantDescriptor())._input_quantizer.num_bits == 8
    with pytest.raises(TypeError, match="set_default_quant_desc_input: value must be a QuantDesc"):
        qnn.QuantConv2d.set_default_quant_desc_input(8)


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d])
def test_settings_of_one_number_hold_for_every_axis(layer: type) -> None:
    net = layer(3, 4, [3, 3, 3][: 3 if layer is nn.Conv3d else 2], stride=[2], padding=[1])
    made = qnn.quantize_model(net).model
    assert made.stride == (2,) * len(net.kernel_size)
    assert made.padding == (1,) * len(net.kernel_size)
    x = torch.randn(2, 3, *[9] * len(net.kernel_size))
    with quantization_disabled(made):
        assert torch.equal(made(x), net(x))
