"""Bits of the weights of output layers: those from which the graph leads to an output alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_qnn import (
    PrecisionPlan,
    QuantConfig,
    apply_precision,
    pt2e_quantizer,
    quantize_model,
    round_weights,
)
from bevquant_quantizers import calibrate

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
CONFIG = QuantConfig(weight_bits=4, output_weight_bits=8)


class Net(nn.Module):
    """Layers, called by a function."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.line = nn.Conv2d(8, 8, 1), nn.Linear(8, 4)
        self.call = forward

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


class Held(nn.Module):
    """A layer that applies its weight by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.weight = nn.Conv2d(3, 8, 1), nn.Parameter(torch.randn(4, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.a(x), self.weight).sigmoid()


def places(scores: Tensor) -> Tensor:
    """Indices of the largest."""
    return scores.flatten(1).topk(3).indices


def weight_bits(model: nn.Module) -> dict[str, Any]:
    """Bits of the weight of each quantized layer."""
    found = model.named_modules()
    return {
        path: m.weight_quantizer.num_bits for path, m in found if hasattr(m, "weight_quantizer")
    }


OUTPUTS: dict[str, tuple[Callable[[Any, Tensor], Any], set[str]]] = {
    "the last": (lambda m, x: m.b(m.a(x).relu()), {"b"}),
    "behind an activation": (lambda m, x: m.b(m.a(x)).sigmoid().flatten(1), {"b"}),
    "two heads of a map": (lambda m, x: (lambda y: {"b": m.b(y), "c": m.c(y)})(m.a(x)), {"b", "c"}),
    "read on too": (lambda m, x: (lambda y: (y, m.c(y.relu())))(m.b(m.a(x))), {"b", "c"}),
    "places of a map": (lambda m, x: places(m.b(m.a(x))), {"b"}),
    "a sum": (lambda m, x: m.b(m.a(x)) + m.c(m.a(x)), {"b", "c"}),
    "a linear layer": (lambda m, x: m.line(m.c(m.a(x)).mean((2, 3))), {"line"}),
    "twice": (lambda m, x: m.b(m.b(m.a(x)).relu()), {"b"}),
}


@pytest.mark.parametrize(("forward", "wide"), OUTPUTS.values(), ids=OUTPUTS)
def test_output_layers_have_their_bits(forward: Any, wide: set[str]) -> None:
    result = quantize_model(Net(forward).eval(), CONFIG, X)
    bits = weight_bits(result.model)
    assert {path for path, n in bits.items() if n == 8} == wide
    assert {n for path, n in bits.items() if path not in wide} == {4}
    notes = [note.path for note in result.skipped if "its weight has 8 bits" in note.reason]
    assert set(notes) == wide
    assert set(weight_bits(quantize_model(Net(forward).eval(), QuantConfig(weight_bits=4), X).model
                           ).values()) == {4}  # fmt: skip


def test_a_layer_in_float_is_the_output_layer() -> None:
    config = QuantConfig(weight_bits=4, output_weight_bits=8, exclude=("b",))
    result = quantize_model(Net(lambda m, x: m.b(m.a(x))).eval(), config, X)
    assert set(weight_bits(result.model).values()) == {4}


def test_a_product_by_a_function_is_an_output_layer() -> None:
    bits = weight_bits(quantize_model(Held().eval(), CONFIG, X).model)
    assert bits == {"a": 4, "quant_conv": 8}


def test_bits_are_those_of_later_steps_and_a_plan_wins() -> None:
    model = quantize_model(Net(lambda m, x: m.b(m.a(x).relu())).eval(), CONFIG, X).model
    calibrate(model, [X], progress=False)
    round_weights(model, [X])
    steps = [len(m.weight_quantizer(m.weight)[0].unique()) for m in (model.a, model.b)]
    assert steps[0] <= 16 < steps[1]
    again = quantize_model(model, QuantConfig(weight_bits=4, output_weight_bits=6), X)
    assert weight_bits(again.model) == {"a": 4, "b": 8, "c": 4, "line": 4}
    apply_precision(model, PrecisionPlan.by_hand(model, {}, "int4"))
    assert set(weight_bits(model).values()) == {4}


def test_settings_that_cannot_hold_are_refused() -> None:
    net = Net(lambda m, x: m.b(m.a(x))).eval()
    with pytest.raises(ValueError, match=r"output_weight_bits=…\) needs example_inputs"):
        quantize_model(net, CONFIG)
    with pytest.raises(ValueError, match="output_weight_bits must be a whole number"):
        QuantConfig(output_weight_bits=1)
    with pytest.raises(ValueError, match="leave output_weight_bits out"):
        pt2e_quantizer(CONFIG)
    assert QuantConfig.from_json(CONFIG.to_json()) == CONFIG
