"""How far functions of floats may be off, against functions that really round each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevquant_export.dense._float_errors import FloatErrors
from bevquant_int8sim import simulate

Fixture = Callable[..., Any]


def _norm(x: Tensor) -> Tensor:
    apart = x - x.mean(-1, keepdim=True)
    return apart / ((apart * apart).mean(-1, keepdim=True) + 1e-5).sqrt()


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * 2**-0.5))


def _attention(x: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2) * 8**-0.5).softmax(-1) @ x


# What a file has, to the operators that it consists of.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "norm": (lambda x: F.layer_norm(x + 3, (8,)), lambda x: _norm(x + 3)),
    "gelu": (F.gelu, _gelu),
    "softmax": (lambda x: F.softmax(4 * x, -1), lambda x: F.softmax(4 * x, -1)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), _attention),
    "cancelling": (lambda x: (x + 50) * 2 - 100, lambda x: (x + 50) * 2 - 100),
    "moved": (lambda x: F.gelu(x).transpose(1, 2), lambda x: _gelu(x).transpose(1, 2)),
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
    errors.run(integers, x)
    assert (errors.values[wanted] == seen[wanted].numpy()).all()
    exact = steps(seen[read].double())
    made = steps(seen[read].half() if half else seen[read])
    off, error = (made.double() - exact).abs().numpy(), errors.errors[wanted]
    assert np.mean(off <= error) > 0.995
    assert off.mean() < error.mean() < 60 * off.mean()


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
