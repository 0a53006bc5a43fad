"""Products of a forward with a parameter that no layer is called for."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bevquant_qnn as qnn
from bevquant_graph import capture
from bevquant_quantizers import TensorQuantizer, calibrate


class PaddingConv(nn.Conv2d):
    """Pads one side more than the other, as TensorFlow's "SAME" does."""

    def forward(self, x):
        x = F.pad(x, (0, 1, 0, 1))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class ConvNormAct(nn.Conv2d):
    """Hands its result on to members of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.after = nn.ReLU()

    def forward(self, x):
        if x.numel() == 0:
            return x
        return self.after(super().forward(x))


def attend(x, qkv_weight, qkv_bias, proj_weight):
    q, k, v = F.linear(x, qkv_weight, qkv_bias).chunk(3, -1)
    return F.linear((q @ k.transpose(1, 2)).softmax(-1) @ v, proj_weight)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return attend(x, self.qkv.weight, self.qkv.bias, self.proj.weight)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.pads = PaddingConv(3, 8, 2, 2)
        self.acts = ConvNormAct(8, 8, 3, padding=1)
        self.attention = Attention()
        self.matrix = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        x = self.pads(x)
        x = self.acts(x) + x
        return F.linear(self.attention(x.flatten(2).transpose(1, 2)), self.matrix)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval(), torch.randn(1, 3, 8, 8)


HELD = [
    ("quant_linear", "QuantHeldLinear"), ("pads.quant_conv", "QuantHeldConv2d"),
    ("acts.quant_conv", "QuantHeldConv2d"), ("attention.quant_linear", "QuantHeldLinear"),
    ("attention.quant_linear_1", "QuantHeldLinear"),
]  # fmt: skip


def test_products_with_parameters_are_quantized_where_they_are(net):
    model, x = net
    names, parameters = list(model.state_dict()), list(model.parameters())
    result = qnn.quantize_model(model, example_inputs=x, inplace=True)
    assert [(q.path, q.kind) for q in result.quantized][:5] == HELD
    assert result.quantized[5].path == "residual_quantizer"  # behind such a convolution, too
    noted = {note.path for note in result.skipped}
    assert not noted & {"pads", "acts", "attention.qkv", "attention.proj", ""}
    assert list(model.state_dict())[: len(names)] == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.pads.quant_conv.weight is model.pads.weight
    assert model.acts.quant_conv._input_quantizer is model.residual_quantizer


def test_what_they_compute_is_fake_quantized(net):
    model, x = net
    wanted = model(x)
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    calibrate(model, [x])
    pads = model.pads
    padded = F.pad(pads.quant_conv._input_quantizer(x), (0, 1, 0, 1))
    expected = F.conv2d(padded, pads.quant_conv._weight_quantizer(pads.weight), pads.bias, 2)
    assert torch.equal(pads(x), expected)
    assert 0 < (model(x) - wanted).abs().max() < 0.05 * wanted.abs().max()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), model(x))
        assert copied.pads.quant_conv.weight is copied.pads.weight
    capture(model, x)


def test_their_weights_are_trained(net):
    model, x = net
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    calibrate(model, [x])
    model.train()(x).square().sum().backward()
    for weight in (model.pads.weight, model.attention.qkv.weight, model.matrix):
        assert weight.grad.abs().sum() > 0


def test_a_call_with_other_settings_is_refused(net):
    model, x = net
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    model.pads.stride = (1, 1)
    with pytest.raises(ValueError, match=r"PaddingConv: the product in .* other parameters or set"):
        model(x)


@pytest.mark.parametrize(
    ("config", "left"),
    [
        (qnn.QuantConfig(exclude=("pads",)), {"pads"}),
        (qnn.QuantConfig(exclude=("*.qkv",)), {"attention.qkv"}),
        (qnn.QuantConfig(quantize_first_layer=False), {"pads"}),
        (qnn.QuantConfig(quantize_linear=False), {"attention.qkv", "attention.proj"}),
    ],
)
def test_settings_hold_for_them(net, config, left):
    model, x = net
    result = qnn.quantize_model(model, config, example_inputs=x)
    held = {q.was.removeprefix("product with ").removesuffix(".weight") for q in result.quantized}
    assert not held & left
    assert {note.path for note in result.skipped} >= left
    assert held & {"acts"}


class Scaled(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight * 2, self.bias)


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("blur", torch.ones(4, 1, 2, 2) / 4)

    def forward(self, x):
        return F.conv2d(x, self.blur, groups=4)


def test_computed_weights_and_buffers_stay_float():
    model = nn.Sequential(Scaled(3, 4, 1), Fixed(), nn.Conv2d(4, 2, 1)).eval()
    result = qnn.quantize_model(model, example_inputs=torch.randn(1, 3, 4, 4))
    assert [q.path for q in result.quantized] == ["2"]
    assert "forward of its own" in next(n.reason for n in result.skipped if n.path == "0")


class Twice(nn.Module):
    """One weight for two inputs, in a loop."""

    def __init__(self):
        super().__init__()
        self.stem, self.weight = nn.Conv1d(3, 4, 1), nn.Parameter(torch.randn(2, 4, 1))

    def forward(self, x, y):
        return [F.conv1d(self.stem(v), self.weight) for v in (x, y)]


def test_each_pass_of_a_line_has_its_layer():
    model = Twice().eval()
    result = qnn.quantize_model(
        model, example_inputs=(torch.randn(1, 3, 4), torch.randn(1, 3, 4)), inplace=True
    )
    assert [q.path for q in result.quantized] == ["stem", "quant_conv", "quant_conv_1"]
    quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    assert len(quantizers) == 6


class ProductPlus(nn.Module):
    """A product and the sum that it begins: one line and column for two operations."""

    def __init__(self, joined):
        super().__init__()
        self.stem, self.weight = nn.Conv2d(4, 4, 1), nn.Parameter(torch.randn(4, 4, 1, 1))
        self.joined = joined

    def forward(self, x):
        return F.conv2d(x, self.weight) + (self.stem(x) if self.joined else x)


@pytest.mark.parametrize("joined", [True, False])
def test_a_product_and_the_sum_it_begins_are_two_places(joined):
    x = torch.randn(2, 4, 5, 5)
    result = qnn.quantize_model(ProductPlus(joined).eval(), example_inputs=(x,))
    assert {"stem", "quant_conv"} <= {q.path for q in result.quantized}
    calibrate(result.model, [(x,)])
    result.model(x)


class Columns(nn.Module):
    """A weight in another shape: patches times the flattened kernel."""

    def __init__(self):
        super().__init__()
        self.stem, self.weight = nn.Conv2d(3, 4, 1), nn.Parameter(torch.randn(6, 4, 3, 3) / 6)
        self.times = 1

    def forward(self, x):
        y = self.stem(x)
        columns = F.unfold(y, 3, padding=1).unflatten(2, y.shape[2:])
        flat = self.weight.flatten(1)[..., None, None]
        return F.conv2d(columns, flat if self.times == 1 else flat[:3])


def test_a_weight_in_another_shape_is_held_too():
    torch.manual_seed(0)
    net, x = Columns().eval(), torch.randn(2, 3, 6, 5)
    result = qnn.quantize_model(net, example_inputs=x)
    model = result.model
    assert [item.path for item in result.quantized] == ["stem", "quant_conv"]
    assert not [note for note in result.skipped if "parameters" in note.reason]
    assert {name for name, _ in model.named_parameters()} == {"stem.weight", "stem.bias", "weight"}
    calibrate(model, [x])
    assert model.quant_conv.weight.shape == (6, 36, 1, 1)
    assert model.quant_conv.weight._base is model.weight
    with torch.no_grad():
        want, made = net(x), model(x)
    assert not torch.equal(made, want)
    assert float((made - want).var() / want.var()) < 1e-3
    model(x).square().sum().backward()
    assert model.weight.grad.shape == (6, 4, 3, 3)
    again = copy.deepcopy(model)
    with torch.no_grad():
        again.weight.zero_()
        assert not again(x).any()
        assert model(x).any()
    model.times = 2
    with pytest.raises(ValueError, match="other parameters or settings"):
        model(x)
