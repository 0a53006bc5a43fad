"""Layers that make an output useless: found, measured, and left in float."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_qnn import (
    PrecisionPlan,
    apply_precision,
    compare_layers,
    float_remedy,
    quantize_model,
)
from bevquant_qnn.matched import Choices
from bevquant_quantizers import calibrate, quantization_disabled


def linears(*sizes: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*map(nn.Linear, sizes[:-1], sizes[1:])).eval()


def collapsing(*sizes: int) -> nn.Sequential:
    """The second layer reads one large channel that it does not use."""
    net = linears(*sizes)
    with torch.no_grad():
        net[0].weight[0] *= 3000
        net[1].weight[:, 0] = 0
    return net


def calibrated(net: nn.Module, *frames: Any) -> Any:
    model = quantize_model(net, example_inputs=frames[0]).model
    calibrate(model, frames, method="max")
    return model


class Chooses(nn.Module):
    """Rows of the highest scores, of a detector whose embedding collapses; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = collapsing(8, 8, 8, 96)
        self.body, self.score = linears(96, 96, 96), nn.Linear(96, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body(self.embed(x).relu())
        best = self.score(features)[:, 0].topk(20)[1]
        return {"kept": features[best], "input": x}


@pytest.mark.parametrize("net", [collapsing(8, 8, 8, 96, 96), Chooses().eval()])
def test_the_layer_that_collapses_is_named_and_repairs_the_result(net: nn.Module) -> None:
    x = torch.randn(64, 8)
    model = calibrated(net, x)
    remedy = float_remedy(model, [x])
    assert remedy is not None
    assert remedy.helps
    assert [path.removeprefix("embed.") for path in remedy.layers] == ["1"]
    assert remedy.before_db < 15 < 25 <= remedy.after_db
    assert 0 < remedy.share < 0.02
    assert str(list(remedy.layers)) in str(remedy)
    apply_precision(model, PrecisionPlan.by_hand(model, dict.fromkeys(remedy.layers, "float")))
    reached = compare_layers(net, model, [x])[-1].sqnr_db
    assert reached == pytest.approx(remedy.after_db, abs=0.5)
    assert float_remedy(model, [x]) is None


def test_no_claim_where_few_layers_do_not_help() -> None:
    x = torch.randn(64, 8)
    dear = calibrated(collapsing(8, 96, 96, 8), x)  # the collapsing layer is nearly all of the work
    remedy = float_remedy(dear, [x])
    assert remedy is not None
    assert not remedy.helps
    assert "NOT usable" not in str(remedy)
    allowed = float_remedy(dear, [x], share=0.95)
    assert allowed is not None
    assert allowed.layers == ("1",)
    coarse = quantize_model(linears(8, *[64] * 12), example_inputs=x).model
    for module in coarse.modules():  # every layer is coarse
        if hasattr(module, "num_bits"):
            module.num_bits = 3
    calibrate(coarse, [x], method="max")
    everywhere = float_remedy(coarse, [x])
    assert everywhere is not None
    assert not everywhere.helps
    assert everywhere.after_db < 25


class Unreached(nn.Module):
    """A layer that runs in other frames alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.other = collapsing(8, 8, 8, 96, 96), nn.Linear(96, 96)

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        x = self.net(x)
        return self.other(x) if more else x


def test_layers_without_a_range_are_left_out() -> None:
    x = torch.randn(64, 8)
    model = calibrated(Unreached().eval(), x)
    assert model.other._input_quantizer.amax is None
    remedy = float_remedy(model, [x])
    assert remedy is not None
    assert remedy.layers == ("net.1",)
    assert float_remedy(Unreached(), [x]) is None


def test_a_good_result_needs_no_remedy_and_the_model_stays_as_it_is() -> None:
    x = torch.randn(16, 8)
    model = calibrated(linears(8, 16, 8), x)
    before = [model(x), str(model)]
    assert float_remedy(model, [x]) is None
    float_remedy(model, [x], useless_db=1000, useful_db=1000)
    assert torch.equal(before[0], model(x))
    assert before[1] == str(model)


class Asserts(nn.Module):
    """Questions of the author beside those of quantizers, on calls that are quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) + x
        assert torch.all(y.abs() < 1e6)
        return self.last(y[-1] + y[0])


@torch.no_grad()
def test_only_the_authors_questions_are_choices_whatever_is_quantized() -> None:
    x = torch.randn(5, 4)
    model = quantize_model(Asserts().eval(), example_inputs=x).model
    calibrate(model, [x])
    with Choices() as ahead:
        model(x)
    with quantization_disabled(model), Choices(ahead) as behind:
        model(x)
    lines = [key.rpartition("/")[2].partition(":")[0] for key in ahead.made if key]
    assert lines == ["test_remedy.py"] * 2  # the assert, and the two rows
    assert ahead.made == behind.made
