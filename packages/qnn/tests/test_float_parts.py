"""What stays float is said: layers of other kinds, functions, and forwards with optional inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bevquant_qnn as qnn
from bevquant_quantizers import quantization_disabled


def notes(result: qnn.QuantizeResult, path: str) -> str:
    return "\n".join(item.reason for item in result.skipped if item.path == path)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(width))
        self.grid = nn.Parameter(torch.ones(width), requires_grad=False)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y = self.norm(x)
        y = self.attend(y, y, y, need_weights=False)[0]
        return self.linear(y) * self.scale + self.grid


def test_norms_and_own_parameters_are_reported() -> None:
    model = nn.Sequential(Attention(4), nn.Identity())
    result = qnn.quantize_model(model, example_inputs=torch.randn(1, 3, 4))
    assert notes(result, "0.norm") == "LayerNorm has no quantized form: it stays float"
    assert "own parameters" in notes(result, "0")
    frozen = Attention(4)
    frozen.scale.requires_grad_(False)
    assert "own parameters" not in notes(qnn.quantize_model(frozen), "")


def test_excluded_norms_say_by_what() -> None:
    model = nn.Sequential(Attention(4))
    result = qnn.quantize_model(model, qnn.QuantConfig(exclude=("0",)), torch.randn(1, 3, 4))
    assert notes(result, "0.norm") == "excluded by '0'"


def test_a_batch_norm_that_follows_no_layer_is_reported_once() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    result = qnn.quantize_model(model, example_inputs=torch.randn(1, 3, 4, 4))
    assert "is not folded into a layer before it" in notes(result, "0")
    assert "directly behind the quantized 1" in notes(result, "2")
    assert len(result.skipped) == 2


class Lift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(3, 6, 1)
        self.out = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.net(x)
        half = x.shape[1] * 1
        weight = y[:, :half].softmax(1)
        return self.out((weight * y[:, half:]).contiguous()).flatten(1).relu()


@pytest.mark.parametrize("observed", [True, False])
def test_functions_that_compute_are_named_and_moves_are_not(observed: bool) -> None:
    result = qnn.quantize_model(
        Lift(), example_inputs=torch.randn(1, 3, 4, 4) if observed else None
    )
    assert notes(result, "").startswith("its own forward calls softmax, mul: ")


class Optional(nn.Module):
    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.conv, self.joins = nn.Conv2d(3, 3, 1), joins

    def forward(self, x, extra=None, flag=False):
        y = self.conv(x)
        if extra is None:
            return y
        return torch.cat([y, extra], 1) if self.joins else self.conv(extra.flatten(0, 1))


def test_optional_tensors_without_joins_leave_no_doubt() -> None:
    x = torch.randn(1, 3, 4, 4)
    assert qnn.quantize_model(Optional(False), example_inputs=(x, x[None])).skipped == ()
    joins = Optional(True)
    result = qnn.quantize_model(joins, example_inputs=(x, x), inplace=True)
    assert "is an output of the model" in notes(result, "")
    assert joins(x).shape == x.shape
    assert joins(x, x).shape == (1, 6, 4, 4)
    result = qnn.quantize_model(Optional(False), example_inputs=(x, x[None], True))
    assert result.skipped == ()


def test_calls_that_differ_in_their_options_are_both_followed() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Optional(False)

        def forward(self, x):
            return self.inner(x) + self.inner(x, x[None])

    model, x = Twice(), torch.randn(1, 3, 4, 4)
    wanted = model(x)
    result = qnn.quantize_model(model, example_inputs=x, inplace=True)
    assert notes(result, "inner") == ""
    assert "residual_quantizer" in [item.path for item in result.quantized]
    for module in model.modules():
        if hasattr(module, "disable"):
            module.disable()
    torch.testing.assert_close(model(x), wanted)


class NormAct(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(super().forward(x))


def test_a_batch_norm_that_no_layer_takes_is_a_quantized_depthwise_convolution() -> None:
    """As in a network with pre-activation: behind pools, sums and concatenations."""
    layers = nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.BatchNorm2d(4), nn.ReLU(), NormAct(4)
    model = nn.Sequential(*layers, nn.Sigmoid(), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3, padding=1))
    model.eval().double()
    for norm in (model[2], model[4], model[6]):
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 8, 8).double()
    expected = model(x)
    result = qnn.quantize_model(model, qnn.QuantConfig(exclude=("6",)), x, inplace=True)
    found = {item.path: (item.kind, item.was) for item in result.quantized}
    assert found["2"] == ("QuantConv2d", "BatchNorm2d")
    assert found["4.norm"] == ("QuantConv2d", "NormAct")
    assert isinstance(model[6], nn.BatchNorm2d)
    assert notes(result, "6") == "excluded by '6'"
    assert list(model[4]._modules) == ["norm", "act"]
    with quantization_disabled(model):
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_batch_norms_that_train_or_normalise_rows_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4))
    result = qnn.quantize_model(model, example_inputs=torch.randn(2, 3, 4, 4), inplace=True)
    assert type(model[2]) is nn.BatchNorm2d
    assert notes(result, "2") == "BatchNorm2d stays float: it is in training mode"
    rows = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4)).eval()
    qnn.quantize_model(rows, example_inputs=torch.randn(2, 3), inplace=True)
    assert type(rows[2]) is nn.BatchNorm1d
