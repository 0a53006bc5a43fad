"""Unsigned ranges: only of tensors that no reader can see below 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_qnn import PrecisionPlan, QuantConfig, apply_precision, pt2e_quantizer, quantize_model
from bevquant_quantizers import TensorQuantizer, calibrate


class Net(nn.Module):
    """Layers, called by a function."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.wide, self.line = nn.Conv2d(8, 8, 1), nn.Conv2d(16, 8, 1), nn.Linear(8, 8)
        self.call = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def unsigned_in(model: nn.Module) -> list[str]:
    """Layers whose inputs are unsigned."""
    return sorted(
        path.partition(".")[0]
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, TensorQuantizer) and module.unsigned
    )


X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
UNSIGNED = QuantConfig(unsigned=True)

POSITIVE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "relu in place": lambda m, x: m.b(m.a(x).relu_()),
    "relu6": lambda m, x: m.b(F.relu6(m.a(x))),
    "hardtanh from 0": lambda m, x: m.b(F.hardtanh(m.a(x), 0.0, 1.0)),
    "clamp": lambda m, x: m.b(m.a(x).clamp(min=0)),
    "clamp above": lambda m, x: m.b(m.a(x).relu().clamp(max=3)),
    "sigmoid": lambda m, x: m.b(m.a(x).sigmoid()),
    "pools and zeros": lambda m, x: m.b(F.pad(F.avg_pool2d(m.a(x).relu(), 2), (1,) * 4)),
    "numbers around": lambda m, x: m.b(F.pad(m.a(x).relu(), (1,) * 4, value=0.5)),
    "reflected": lambda m, x: m.b(F.pad(m.a(x).relu(), (1,) * 4, mode="reflect")),
    "bilinear": lambda m, x: m.b(F.interpolate(m.a(x).relu(), scale_factor=2, mode="bilinear")),
    "sum": lambda m, x: m.b(m.a(x).relu() + m.a(x).square()),
    "gate": lambda m, x: m.b(m.a(x).relu() * m.a(x).sigmoid()),
    "twice": lambda m, x: m.b(m.b(m.a(x).relu()).relu()),
}  # fmt: skip

NEGATIVE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "raw": lambda m, x: m.b(m.a(x)),
    "leaky": lambda m, x: m.b(F.leaky_relu(m.a(x))),
    "silu": lambda m, x: m.b(F.silu(m.a(x))),
    "hardtanh": lambda m, x: m.b(F.hardtanh(m.a(x))),
    "bicubic": lambda m, x: m.b(F.interpolate(m.a(x).relu(), scale_factor=2, mode="bicubic")),
    "padding below 0": lambda m, x: m.b(F.pad(m.a(x).relu(), (1,) * 4, value=-1.0)),
    "clamp to below 0": lambda m, x: m.b(m.a(x).relu().clamp(max=-0.5)),
    "difference": lambda m, x: m.b(m.a(x).relu() - 1),
    "sum below 0": lambda m, x: m.b(m.a(x).relu() + (-1.0)),
    "minus by alpha": lambda m, x: m.b(torch.add(m.a(x).relu(), m.a(x).relu(), alpha=-1)),
    "product below 0": lambda m, x: m.b(m.a(x).relu() * -2),
    "mixed concatenation": lambda m, x: m.wide(torch.cat([m.a(x), m.a(x).relu()], 1)),
    "second call": lambda m, x: m.b(m.b(m.a(x).relu())),
    "a parameter added": lambda m, x: m.b(m.a(x).relu() + m.c.bias[:, None, None]),
}


@pytest.mark.parametrize("forward", POSITIVE.values(), ids=POSITIVE)
def test_tensors_that_are_never_negative(forward: Any) -> None:
    model = quantize_model(Net(forward).eval(), UNSIGNED, X).model
    assert "b" in unsigned_in(model)
    calibrate(model, [X], method="max", progress=False)
    model(10 * X)  # an unsigned quantizer refuses negative values
    assert unsigned_in(quantize_model(Net(forward).eval(), None, X).model) == []


@pytest.mark.parametrize("forward", NEGATIVE.values(), ids=NEGATIVE)
def test_tensors_that_may_be_negative(forward: Any) -> None:
    assert unsigned_in(quantize_model(Net(forward).eval(), UNSIGNED, X).model) == []


def test_all_readers_of_one_range_agree() -> None:
    def residual(m: Any, x: Tensor) -> Tensor:
        x = m.a(x).relu()
        y = (m.b(x) + x).relu()  # m.b(x) may be negative
        return m.line(F.adaptive_avg_pool2d(m.c(y).relu(), 1).flatten(1)) + m.b(x).mean()

    model = quantize_model(Net(residual).eval(), UNSIGNED, X).model
    assert unsigned_in(model) == ["b", "c", "line", "residual_quantizer"]


def test_half_the_step() -> None:
    net = Net(POSITIVE["relu in place"]).eval()
    read = net.a(X).relu().detach()
    errors = []
    for config in (QuantConfig(), UNSIGNED):
        model: Any = quantize_model(net, config, X).model
        calibrate(model, [X], method="max", progress=False)
        errors.append(float((model.b._input_quantizer(read) - read).square().mean()))
    assert 0.2 < errors[1] / errors[0] < 0.3


@pytest.mark.parametrize("precision", ["fp8", "int16", "float", "int4", "int8"])
def test_plans_of_other_formats_are_signed(precision: str) -> None:
    model = quantize_model(Net(POSITIVE["relu in place"]).eval(), UNSIGNED, X).model
    calibrate(model, [X], progress=False)
    apply_precision(model, PrecisionPlan.by_hand(model, {"b": precision}))
    model(X)
    calibrate(model, [X], progress=False)  # searched in the plan's format
    assert unsigned_in(model) == ([] if precision in ("fp8", "int16") else ["b"])


def test_ranges_that_exist_keep_their_sign() -> None:
    model = quantize_model(Net(POSITIVE["relu in place"]).eval(), None, X).model
    calibrate(model, [X], progress=False)
    assert unsigned_in(quantize_model(model, UNSIGNED, X).model) == []


def test_unsigned_is_refused_where_it_has_no_meaning() -> None:
    with pytest.raises(ValueError, match="annotations are of signed integers"):
        pt2e_quantizer(UNSIGNED)
    with pytest.raises(ValueError, match=r"unsigned=True\) needs example_inputs"):
        quantize_model(Net(POSITIVE["sigmoid"]), UNSIGNED)
