from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_hybrid.qtensor import QTensor


@pytest.fixture(params=["floats", "integers"])
def q(request) -> QTensor:
    integers = torch.randint(-128, 128, (2, 4, 6, 6), dtype=torch.int8)
    scale = torch.tensor([0.05])
    data = integers if request.param == "integers" else integers * scale
    return QTensor(data, scale, "qint8")


def test_both_forms_are_the_same_tensor() -> None:
    integers = torch.randint(-128, 128, (3, 5), dtype=torch.int8)
    scale = torch.rand(5) + 0.01
    fixed = QTensor(integers, scale, "qint8", 1)
    trained = QTensor(integers * scale, scale, "qint8", 1)
    assert torch.equal(fixed.int_repr(), trained.int_repr())
    torch.testing.assert_close(fixed.dequantize(), trained.dequantize())
    assert fixed.holds_integers
    assert not trained.holds_integers


KEEPING = [
    nn.ReLU(),
    nn.MaxPool2d(3, 2, 1),
    nn.Upsample(scale_factor=2),
    nn.ZeroPad2d(1),
    nn.ReplicationPad2d(2),
    nn.Flatten(),
    nn.PixelShuffle(2),
    nn.Identity(),
    lambda x: x.permute(0, 2, 3, 1).reshape(2, -1),
    lambda x: x[:, 1:3].transpose(1, 2),
    lambda x: torch.max(x, 1).values,
    lambda x: x.chunk(2, 1)[1],
    lambda x: x.contiguous().unsqueeze(0).squeeze(0),
    lambda x: x.moveaxis(1, -1).swapdims(0, 1),
    lambda x: x.flatten(1).t(),
    lambda x: torch.t(x[0, 0]).view_as(torch.empty(x[0, 0].shape)),
]


@pytest.mark.parametrize("function", KEEPING)
def test_functions_that_keep_the_scale(q: QTensor, function) -> None:
    result = function(q)
    assert isinstance(result, QTensor)
    assert torch.equal(result.scale, q.scale)
    torch.testing.assert_close(result.dequantize(), function(q.dequantize()))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: F.interpolate(x, 9, mode="bilinear", antialias=True), "without antialias"),
        (lambda x: torch.clamp(x, torch.zeros(()), torch.ones(())), "numbers as its bounds"),
        (lambda x: torch.abs(x, out=torch.empty(0)), r"abs of a QTensor: .*'out'"),
    ],
)
def test_settings_that_a_bpu_lacks_are_refused(q: QTensor, function, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        function(q)


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_factor": 2.0},
        {"scale_factor": 1.6},
        {"scale_factor": 1.6, "recompute_scale_factor": True},
        {"size": (5, 9), "align_corners": True},
    ],
)
def test_bilinear_results_lie_on_the_grid_half_a_step_away(q: QTensor, settings) -> None:
    result = F.interpolate(q, mode="bilinear", **settings).dequantize()
    exact = F.interpolate(q.dequantize(), mode="bilinear", **settings)
    assert (result - exact).abs().max() <= 0.025 + 1e-5
    assert (result / 0.05 - (result / 0.05).round()).abs().max() < 1e-4


@pytest.mark.parametrize(
    "function", [nn.ReLU6(), nn.Hardtanh(-0.31, 1.0), lambda x: x.clamp(max=1.02)]
)
def test_bounds_are_rounded_to_steps(q: QTensor, function) -> None:
    result = function(q).dequantize()
    assert (result - function(q.dequantize())).abs().max() <= 0.025 + 1e-6


def test_indices_and_truth_values_need_no_dequantizing(q: QTensor) -> None:
    values = q.dequantize()
    assert torch.equal(q.argmax(1), values.argmax(1))
    assert type(torch.argmax(q, 1)) is torch.Tensor
    assert torch.equal(torch.max(q, 1).indices, values.max(1).indices)
    assert torch.equal(q > 0.5, values > 0.5)


def test_the_largest_magnitude_saturates() -> None:
    q = QTensor(torch.tensor([-128, 5], dtype=torch.int8), torch.ones(1), "qint8")
    assert q.abs().int_repr().tolist() == [127, 5]


@pytest.mark.parametrize(
    "function",
    [
        torch.sigmoid,
        lambda x: x + x,
        lambda x: 2 * x,
        F.selu,
        lambda x: torch.cat([x, x]),
        torch.sum,
    ],
)
def test_results_of_another_scale_are_refused(q: QTensor, function) -> None:
    with pytest.raises(NotImplementedError, match=r"FloatFunctional|DeQuantStub"):
        function(q)


def test_a_lenient_tensor_falls_back_to_floats() -> None:
    q = QTensor(torch.tensor([0.5]), torch.tensor([0.5]), "qint8", lenient=True)
    result = torch.sigmoid(q.view(1, 1))
    assert type(result) is torch.Tensor
    torch.testing.assert_close(result, torch.sigmoid(torch.tensor([[0.5]])))


def test_scales_of_channels_follow_a_view() -> None:
    integers = torch.randint(-(2**20), 2**20, (2, 3, 2, 2), dtype=torch.int32)
    q = QTensor(integers, torch.tensor([0.1, 0.2, 0.4]), "qint32", 1)
    for view in (lambda x: x.permute(0, 2, 3, 1).reshape(-1, 3), lambda x: x.flatten(1)):
        torch.testing.assert_close(view(q).dequantize(), view(q.dequantize()))
    with pytest.raises(NotImplementedError, match="high-precision"):
        torch.max(q, 1)
    assert torch.equal(q.argmax(1), q.dequantize().argmax(1))


def test_gradients_and_copies(q: QTensor) -> None:
    assert torch.equal(copy.deepcopy(q).dequantize(), q.dequantize())
    x = torch.randn(3, requires_grad=True)
    QTensor(x * 2, torch.ones(1), "qint8").relu().dequantize().sum().backward()
    assert torch.equal(x.grad, 2.0 * (x > 0))
