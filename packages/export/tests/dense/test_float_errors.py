"""How far functions of floats may be off, against functions that really round each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevquant_export.dense.verify import _float_errors
from bevquant_export.dense.verify._float_errors import FloatErrors
from bevquant_int8sim import simulate

Fixture = Callable[..., Any]


def _norm(x: Tensor) -> Tensor:
    apart = x - x.mean(-1, keepdim=True)
    return apart / ((apart * apart).mean(-1, keepdim=True) + 1e-5).sqrt()


def _rms(x: Tensor, two: Any) -> Tensor:
    return x / ((x**two).mean(-1, keepdim=True) + 1e-5).sqrt()


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * 2**-0.5))


def _sigmoid(x: Tensor) -> Tensor:
    """As ONNX Runtime: an odd function of float32, moved by a half."""
    at_least = torch.promote_types(x.dtype, torch.float32)
    return (0.5 + 0.5 * torch.tanh(x.to(at_least) / 2)).to(x)


def _elu(x: Tensor) -> Tensor:
    at_least = torch.promote_types(x.dtype, torch.float32)
    return torch.where(x < 0, (x.to(at_least).exp() - 1).to(x), x)


def _attention(x: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2) * 8**-0.5).softmax(-1) @ x


# What a file has, to the operators that it consists of.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "norm": (lambda x: F.layer_norm(x + 3, (8,)), lambda x: _norm(x + 3)),
    "gelu": (F.gelu, _gelu),
    "sigmoid": (lambda x: (x - 4).sigmoid(), lambda x: _sigmoid(x - 4)),
    "silu": (lambda x: F.silu(x - 4), lambda x: (x - 4) * _sigmoid(x - 4)),
    "glu": (lambda x: F.glu((x - 4).repeat(1, 1, 2)), lambda x: (x - 4) * _sigmoid(x - 4)),
    "elu": (lambda x: F.elu(x / 64), lambda x: _elu(x / 64)),
    "softmax": (lambda x: F.softmax(4 * x, -1), lambda x: F.softmax(4 * x, -1)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), _attention),
    "cancelling": (lambda x: (x + 50) * 2 - 100, lambda x: (x + 50) * 2 - 100),
    "moved": (lambda x: F.gelu(x).transpose(1, 2), lambda x: _gelu(x).transpose(1, 2)),
    "rms": (lambda x: _rms(x, torch.tensor(2.0)), lambda x: _rms(x, 2)),
    "repeated": (
        lambda x: F.interpolate(F.gelu(x)[None], scale_factor=(2, 1))[0],
        lambda x: _gelu(x).repeat_interleave(2, 1),
    ),
}


class Between(nn.Module):
    """A function of floats between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, 8), nn.Linear(width, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_reach_what_rounding_does_and_little_further(
    calibrated: Fixture, name: str, half: bool
) -> None:
    torch.manual_seed(0)
    function, steps = FUNCTIONS[name]
    x = torch.randn(4, 50, 6)
    integers = simulate(calibrated(Between(function, 50 if name == "moved" else 8), x), x)
    first, last = (step for step in integers.steps if step.op == "linear")
    (rounds,) = (step for step in integers.steps if last.args[0].name in step.outputs)
    wanted, read = rounds.args[0].name, first.outputs[0]
    errors = FloatErrors(integers.program, {wanted}, half=half)
    seen: dict[str, Tensor] = {}
    integers.run(x, observe=lambda step, _, made: seen.update(zip(step.outputs, made, strict=True)))
    with mock.patch.object(integers, "run", side_effect=integers.run) as run:
        errors.run(integers, x)
    assert run.call_count == 1  # of the model, beside all perturbed values
    assert (errors.values[wanted] == seen[wanted].numpy()).all()
    exact = steps(seen[read].double())
    made = steps(seen[read].half() if half else seen[read])
    off, error = (made.double() - exact).abs().numpy(), errors.errors[wanted]
    assert np.mean(off <= error) > 0.995
    assert off.mean() < error.mean() < 60 * off.mean()


@pytest.mark.parametrize(("size", "runs"), [(2**24, 1), (2**25, 2), (2**26, 3), (2**27, 6)])
def test_few_perturbed_values_of_a_large_tensor_are_held_at_once(
    calibrated: Fixture, size: int, runs: int
) -> None:
    x = torch.randn(4, 50, 6)
    integers = simulate(calibrated(Between(FUNCTIONS["norm"][0], 8), x), x)
    wanted = [step for step in integers.steps if step.op == "quantize"][-1].args[0].name
    usual = FloatErrors(integers.program, {wanted}, half=False)
    usual.run(integers, x)
    sizes = {wanted: size, "a tensor that is not followed": 2**30}
    errors = FloatErrors(integers.program, {wanted}, half=False, sizes=sizes)
    few = mock.patch.object(_float_errors, "_DRAWN", 1000)  # of 1,600 values
    with few, mock.patch.object(integers, "run", side_effect=integers.run) as run:
        errors.run(integers, x)
    assert run.call_count == runs
    assert 0.8 < errors.errors[wanted].mean() / usual.errors[wanted].mean() < 1.25


@pytest.mark.parametrize("name", ["norm", "gelu"])
def test_more_runs_miss_no_error_by_chance(calibrated: Fixture, name: str) -> None:
    torch.manual_seed(0)
    function, steps = FUNCTIONS[name]
    x = torch.randn(4, 6000, 6)
    integers = simulate(calibrated(Between(function, 8), x), x)
    first, last = (step for step in integers.steps if step.op == "linear")
    (rounds,) = (step for step in integers.steps if last.args[0].name in step.outputs)
    wanted, read = rounds.args[0].name, first.outputs[0]
    seen: dict[str, Tensor] = {}
    integers.run(x, observe=lambda step, _, made: seen.update(zip(step.outputs, made, strict=True)))
    off = (steps(seen[read].half()).double() - steps(seen[read].double())).abs().numpy()
    errors = FloatErrors(integers.program, {wanted}, half=True)
    errors.run(integers, x)
    few = np.mean(off > errors.errors[wanted])
    with mock.patch.object(integers, "run", side_effect=integers.run) as run:
        errors.run(integers, x, 24)
    assert run.call_count == 1
    more = np.mean(off > errors.errors[wanted])
    assert few > 5 * more


def test_errors_of_a_norm_reach_those_of_sums_made_one_by_one(calibrated: Fixture) -> None:
    x = torch.randn(4, 4096, 6)
    model = calibrated(Between(lambda y: F.group_norm(y, 1), 8), x)
    integers = simulate(model, x)
    (step,) = (step for step in integers.steps if step.op == "float")
    errors = FloatErrors(integers.program, {*step.inputs, *step.outputs}, half=False)
    errors.run(integers, x)
    given = errors.values[step.inputs[0]].reshape(4, -1)
    apart = given - np.cumsum(given, 1)[:, -1:] / np.float32(given.shape[1])
    variance = np.cumsum(apart * apart, 1)[:, -1:] / np.float32(given.shape[1])
    wanted = F.group_norm(torch.from_numpy(given).double().view(4, 4096, 8), 1).numpy()
    off = np.abs((apart / np.sqrt(variance + np.float32(1e-5))).reshape(wanted.shape) - wanted)
    error = errors.errors[step.outputs[0]]
    assert np.mean(off <= error) > 0.995
    assert off.mean() < error.mean() < 60 * off.mean()


class Added(nn.Module):
    """A norm of the sum of two layers, whose terms are far larger than some of their sums."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.layer_norm(self.one(x) + self.two(x), (8,)))


@pytest.mark.parametrize("half", [False, True])
def test_errors_of_added_accumulators_reach_those_of_rounded_terms(
    calibrated: Fixture, half: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 200, 6)
    integers = simulate(calibrated(Added(), x), x)
    (step,) = (step for step in integers.steps if step.op == "add")
    assert all(integers.program.values[name].form == "int32" for name in step.inputs)
    errors = FloatErrors(integers.program, set(step.outputs), half=half)
    seen: dict[str, Tensor] = {}
    errors.run(integers, x)
    integers.run(x, observe=lambda s, _, made: seen.update(zip(s.outputs, made, strict=True)))
    terms = [seen[n].double() * s for n, s in zip(step.inputs, step.scales, strict=True)]
    real = [term.half() if half else term.float() for term in terms]
    off = (sum(real).double() - sum(terms)).abs().numpy()
    assert np.mean(off <= errors.errors[step.outputs[0]]) > 0.995


SUMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Any], Any]]] = {
    "mean": (lambda y: y.mean(1, keepdim=True), lambda y: y / np.float32(4096)),
    "sum": (lambda y: y.sum(1, keepdim=True), lambda y: y),
    "matmul": (lambda y: torch.ones(1, 4096) @ y, lambda y: y),
}


@pytest.mark.parametrize("name", SUMS)
def test_errors_of_a_sum_reach_those_of_terms_added_one_by_one(
    calibrated: Fixture, name: str
) -> None:
    function, terms = SUMS[name]
    x = torch.randn(16, 4096, 6)
    integers = simulate(calibrated(Between(lambda y: function(y.sigmoid()), 8), x), x)
    (step,) = (step for step in integers.steps if name in str(step.target))
    errors = FloatErrors(integers.program, {*step.inputs, *step.outputs}, half=False)
    errors.run(integers, x)
    given = next(v for v in (errors.values[n] for n in step.inputs) if v.shape == (16, 4096, 8))
    off = np.abs(
        np.cumsum(terms(given), 1)[:, -1:] - terms(given.astype(np.float64)).sum(1)[:, None]
    )
    error = errors.errors[step.outputs[0]].reshape(off.shape)
    assert np.mean(off <= error) > 0.95
    assert off.mean() < error.mean() < 60 * off.mean()


class Resized(nn.Module):
    """An image that is made fit for a layer."""

    def __init__(self, resize: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.resize = nn.Conv2d(3, 4, 1), resize

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.resize(x))


# Layers, the shapes of their inputs, and how many products a sum has.
LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(96, 8), (2, 400, 96), 96),
    "conv": (lambda: nn.Conv2d(16, 8, 3, 2, (1, 0), groups=2), (2, 16, 32, 30), 72),
    "transposed": (lambda: nn.ConvTranspose2d(96, 8, 2, 2, 1, 1, groups=2), (2, 96, 12, 10), 192),
}


@pytest.mark.parametrize(
    ("name", "half"), [*((name, False) for name in LAYERS), ("transposed", True)]
)
def test_errors_reach_what_float_sums_of_layers_lose(
    calibrated: Fixture, name: str, half: bool
) -> None:
    make, shape, terms = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    last = nn.Linear(8, 4) if name == "linear" else nn.Conv2d(8, 4, 1)
    integers = simulate(calibrated(nn.Sequential(layer, nn.GELU(), last), x), x)
    (_, step, gelu, *_) = integers.steps
    seen: dict[str, Tensor] = {}
    integers.run(x, observe=lambda step, _, made: seen.update(zip(step.outputs, made, strict=True)))
    (wanted,) = gelu.outputs
    errors = FloatErrors(integers.program, {wanted}, half=half)
    errors.run(integers, x)
    read, weight = step.args[0].name, step.tensors["weight"]
    scale = integers.program.values[read].form.scale
    units = (step.tensors["multiplier"] / scale).view(-1, *[1] * (weight.dim() - 1))
    if name == "transposed":  # two groups, whose outputs are the second axis
        units = units.view(2, 1, 4).expand(2, 48, 4).reshape(96, 4, 1, 1)
    made = []
    for dtype in (torch.float32, torch.float64):
        factors = weight.to(dtype) * units.to(dtype), seen[read].to(dtype) * scale
        if half and not made:  # a transposed convolution has them in half precision
            factors = factors[0].half().to(dtype), factors[1].half().to(dtype)
        layer.to(dtype).weight.data = factors[0]
        made.append(_gelu(layer(factors[1])))
    off, error = (made[0].double() - made[1]).abs().detach().numpy(), errors.errors[wanted]
    assert np.mean(off <= error) > 0.998
    assert off.mean() < error.mean() < 20 * terms**0.5 * off.mean()


def test_errors_of_a_resize_are_those_of_the_places_it_reads_at(calibrated: Fixture) -> None:
    def resize(x: Tensor) -> Tensor:
        return F.interpolate(x, (97, 53), mode="bicubic")

    x = torch.randn(1, 3, 120, 60)
    integers = simulate(calibrated(Resized(resize), x), x)
    rounds = next(step for step in integers.steps if step.op == "quantize")
    wanted = rounds.args[0].name
    errors = FloatErrors(integers.program, {wanted}, half=False)
    errors.run(integers, x)
    off, error = (resize(x).double() - resize(x.double())).abs().numpy(), errors.errors[wanted]
    assert np.mean(off <= error) > 0.995
    assert off.mean() < error.mean() < 60 * off.mean()


class Unfollowed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x if float(x.detach().sum()) > 1e9 else x


class Positions(nn.Module):
    """A table of positions, resized to a size that is computed: open, as a module reads values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last, self.end = nn.Conv2d(3, 4, 2, 2), nn.Conv2d(4, 2, 1), Unfollowed()
        self.table = nn.Parameter(torch.randn(1, 4, 5, 5))

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2] // 2, x.shape[3] // 2
        return self.end(self.last(self.conv(x) + F.interpolate(self.table, size, mode="bicubic")))


def test_a_size_that_is_computed_is_not_rounded(calibrated: Fixture) -> None:
    model, x = Positions(), torch.randn(1, 3, 8, 14)
    integers = simulate(calibrated(model, x), x)
    made = next(step for step in integers.steps if "upsample" in step.outputs[0]).outputs[0]
    errors = FloatErrors(integers.program, {made}, half=False)
    errors.run(integers, x)
    assert errors.errors[made].shape == (1, 4, 4, 7)
    assert (errors.errors[made] > 0).all()


def _edge(x: Tensor) -> Tensor:
    return (1 - x.clamp(-0.5, 0.5).mul(2).square()).sqrt()


@pytest.mark.parametrize("function", [_edge, lambda x: (2 * x.clamp(-0.5, 0.5)).acos()])
def test_rounding_leaves_the_domain_of_a_function(calibrated: Fixture, function: Any) -> None:
    x = torch.randn(4, 50, 6)
    integers = simulate(calibrated(Between(function, 8), x), x)
    wanted = [step for step in integers.steps if step.op == "quantize"][-1].args[0].name
    errors = FloatErrors(integers.program, {wanted}, half=False)
    errors.run(integers, x)
    assert np.isfinite(errors.values[wanted]).all()
    assert np.isfinite(errors.errors[wanted]).all()
    assert 0 < errors.errors[wanted].max() < 0.01


class Keeps(nn.Module):
    """Rows whose first value is above a threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.threshold = nn.Linear(6, 8), nn.Linear(8, 4), 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        return self.last(x[x[:, 0] > self.threshold].tanh())


def test_rows_that_rounding_chooses_have_no_error_and_readers_those_of_the_models_rows(
    calibrated: Fixture,
) -> None:
    torch.manual_seed(0)
    model, x = Keeps(), torch.randn(60, 6)
    found = []
    for share in (0.5, 1.0, 1.0):  # of the way from one row's value to the next one's
        integers = simulate(calibrated(model, x), x)
        made = {step.called: step.outputs[0] for step in integers.steps}
        rows, read = made["getitem"], made["tanh"]
        errors = FloatErrors(integers.program, {made["gelu"], rows, read}, half=False)
        errors.run(integers, x)
        found.append(rows in errors.errors)
        assert errors.errors[read].shape == errors.values[read].shape
        assert errors.errors[read].max() > 0
        one, other, *_ = np.sort(errors.values[made["gelu"]][:, 0])[30:]
        model.threshold = float(one + share * (other - one))
    assert found == [True, True, False]


def test_further_runs_follow_the_rest_up_to_its_last_step(calibrated: Fixture) -> None:
    x = torch.randn(60, 6)
    integers = simulate(calibrated(Between(lambda y: F.gelu(y).tanh(), 8), x), x)
    made = {step.called: step.outputs[0] for step in integers.steps}
    errors = FloatErrors(integers.program, {made["gelu"], made["tanh"]}, half=False)
    errors.run(integers, x)
    gelu, tanh = (errors.errors[made[name]] for name in ("gelu", "tanh"))
    errors.only({made["gelu"]})
    run, seen = integers.run, list[str]()

    def observed(args: Any, *, observe: Any) -> Any:
        return run(args, observe=lambda step, *v: (seen.append(step.called), observe(step, *v)))

    with mock.patch.object(integers, "run", observed):
        errors.run(integers, x)
    assert seen[-1] == "gelu"
    assert errors.errors[made["tanh"]] is tanh
    assert (errors.errors[made["gelu"]] != gelu).any()


def test_errors_are_the_same_in_every_run(calibrated: Fixture) -> None:
    x = torch.randn(2, 5, 6)
    integers = simulate(calibrated(Between(F.gelu, 8), x), x)
    last = [step for step in integers.steps if step.op == "quantize"][-1]
    wanted = last.args[0].name
    found = []
    for _ in range(2):
        errors = FloatErrors(integers.program, {wanted}, half=False)
        errors.run(integers, x)
        found.append(errors.errors[wanted])
    assert (found[0] == found[1]).all()
    assert found[0].max() > 0
