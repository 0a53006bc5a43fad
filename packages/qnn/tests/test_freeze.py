"""freeze: constant ranges, or a list of what has none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bevquant_qnn as qnn
from bevquant_quantizers import QuantDescriptor, TensorQuantizer


def _calibrated(model, x):
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    activations = [m for m in model.modules() if isinstance(m, TensorQuantizer) and m.axis is None]
    for quantizer in activations:
        quantizer.enable_calib()
        quantizer.disable_quant()
    model(x)
    for quantizer in activations:
        quantizer.load_calib_amax("mse")
    return model


def test_afterwards_nothing_depends_on_data_or_calibrates():
    x = torch.randn(4, 3, 8, 8)
    model = _calibrated(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), x)
    frozen = qnn.freeze(model)
    assert frozen == tuple(
        path for path, m in model.named_modules() if isinstance(m, TensorQuantizer)
    )
    for path in frozen:
        quantizer = model.get_submodule(path)
        assert quantizer.amax is not None
        assert quantizer._if_quant
        assert not quantizer._if_calib
    state = {k: v.clone() for k, v in model.state_dict().items()}
    outputs = model(x)
    model(100 * x)
    assert torch.equal(model(x), outputs)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    # A weight that changes is now measured with the frozen range.
    largest = model[0].weight_quantizer.amax.clone()
    model[0].weight.data *= 10
    assert (model[0].quantized_weight().abs() <= largest * 128.5 / 127).all()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(4, 3), (3, 1)),
        (nn.Conv2d(4, 3, 3), (3, 1, 1, 1)),
        (nn.ConvTranspose2d(4, 3, 3), (1, 3, 1, 1)),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 1, 3, 1, 1)),
    ],
)
def test_weight_range_is_what_was_used_before(layer, shape):
    model = nn.Sequential(layer)
    qnn.quantize_model(model, inplace=True)
    model[0].input_quantizer.amax = 1.0
    before = model[0].quantized_weight()
    qnn.freeze(model)
    assert model[0].weight_quantizer.amax.shape == shape
    assert torch.equal(model[0].quantized_weight(), before)


def test_sparse_weight_range_follows_the_reading_of_one_by_one_kernels(spconv):
    model = nn.Sequential(qnn.QuantSparseConvolution(spconv.SubMConv3d(4, 6, 1)))
    model[0].input_quantizer.amax = 1.0
    before = model[0].quantized_weight()
    qnn.freeze(model)
    assert torch.equal(model[0].quantized_weight(), before)
    expected = model[0].weight.detach().view(4, 6).abs().amax(0)
    assert torch.equal(model[0].weight_quantizer.amax.flatten(), expected)


def test_trap_07_every_unusable_range_is_listed_and_nothing_changes():
    layers = [nn.Linear(2, 2) for _ in range(6)]
    model = nn.Sequential(*layers)
    qnn.quantize_model(model, inplace=True)
    for index, amax in enumerate([None, float("nan"), 0.0, float("inf"), -1.0, 1.0]):
        if amax is not None:
            model[index].input_quantizer.amax = amax
    model[5].input_quantizer.enable_calib()
    with pytest.raises(ValueError, match="5 of 12 quantizers have no usable range") as caught:
        qnn.freeze(model)
    reasons = ["not calibrated", "NaN or Inf", "zero", "NaN or Inf", "negative"]
    for index, reason in enumerate(reasons):
        assert f"{index}._input_quantizer ({reason})" in str(caught.value)
    assert "5._input_quantizer" not in str(caught.value)
    assert model[5].input_quantizer._if_calib
    assert model[5].weight_quantizer.amax is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [(float("nan"), "NaN or Inf"), (float("inf"), "NaN or Inf"), (-1, "negative")],
)
@pytest.mark.parametrize("channel", [0, 1, 2])
def test_one_unusable_channel_among_others_is_enough(value, reason, channel):
    layer = qnn.QuantLinear(2, 3)
    layer.input_quantizer.amax = 1.0
    amax = torch.tensor([[0.0], [0.5], [2.0]])
    layer.weight_quantizer.amax = amax.index_fill(0, torch.tensor(channel), value)
    with pytest.raises(ValueError, match=rf"_weight_quantizer \({reason}\)"):
        qnn.freeze(layer)
    layer.weight_quantizer.amax = amax
    qnn.freeze(layer)


def test_disabled_quantizers_are_left_alone():
    model = nn.Sequential(nn.Linear(2, 2))
    qnn.quantize_model(model, inplace=True)
    model[0].input_quantizer.disable()
    assert qnn.freeze(model) == ("0._weight_quantizer",)
    assert model[0].input_quantizer._disabled


def test_a_channel_of_zeros_is_no_error():
    layer = qnn.QuantLinear(2, 3, bias=False)
    layer.weight.data[1] = 0
    layer.input_quantizer.amax = 1.0
    qnn.freeze(layer)
    out = layer(torch.ones(1, 2))
    assert torch.isfinite(out).all()
    assert out[0, 1] == 0


def test_learned_range_becomes_the_buffer():
    layer = qnn.QuantLinear(2, 2, quant_desc_input=QuantDescriptor(amax=1.0, learn_amax=True))
    layer.input_quantizer.clip.clip_value_max.data.fill_(2.5)
    x = torch.tensor([[3.0, 0.3]])
    before = layer(x)
    qnn.freeze(layer)
    assert layer.input_quantizer.amax.item() == 2.5
    assert not layer.input_quantizer.clip.clip_value_max.requires_grad
    assert torch.equal(layer(x), before)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
