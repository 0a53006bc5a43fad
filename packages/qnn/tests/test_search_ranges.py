"""Ranges searched by the output: maps with one vector in most places, other groups, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_qnn import QuantConfig, quantize_model, search_ranges
from bevquant_quantizers import calibrate


def pillars(places: int) -> Tensor:
    """Maps with large values in few places."""
    x = torch.zeros(1, 4, 24, 24)
    index = torch.randint(0, 24, (2, places))
    x[0, :, index[0], index[1]] = 20 * torch.randn(4, places)
    return x


@pytest.fixture(scope="module", params=[8, 6])
def net(request: Any) -> Any:
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    frames = [pillars(30) for _ in range(2)]
    config = QuantConfig(weight_bits=request.param)
    model = quantize_model(nn.Sequential(*layers).eval(), config, example_inputs=frames[0]).model
    calibrate(model, frames)
    return model, frames


def sqnr(model: Any, frames: list[Tensor], alone: str) -> float:
    """Of the output with one layer quantized, from the definition."""
    single = copy.deepcopy(model)
    for path, module in single.named_modules():
        if hasattr(module, "disable") and not path.startswith(f"{alone}."):
            module.disable()
    exact = copy.deepcopy(single)
    for module in exact.modules():
        if hasattr(module, "disable"):
            module.disable()
    with torch.no_grad():
        pairs = [(exact(x), single(x)) for x in frames]
    signal = sum(float(y.double().square().sum()) for y, _ in pairs)
    noise = sum(float((y - z).double().square().sum()) for y, z in pairs)
    return float(10 * torch.log10(torch.tensor(signal / noise)))


def test_a_bad_range_is_found_and_the_gain_is_that_of_full_runs(net: Any) -> None:
    model, frames = copy.deepcopy(net[0]), net[1]
    model[2].input_quantizer.amax = model[2].input_quantizer.amax * 6
    ranges = [model[i].input_quantizer.amax.clone() for i in (0, 2, 4, 6)]
    before = sqnr(model, frames, "2")
    (row, *_) = search_ranges(model, frames, share=0.5).rows
    assert row.modules == ("2",)
    assert row.factor < 1
    assert row.before_db == pytest.approx(before, abs=1e-3)
    assert row.after_db == pytest.approx(sqnr(model, frames, "2"), abs=1e-3)
    assert row.after_db > before + 3
    after = [model[i].input_quantizer.amax for i in (0, 2, 4, 6)]
    assert torch.equal(after[1], ranges[1] * row.factor)
    assert [torch.equal(a, b) for a, b in zip(after, ranges, strict=True)].count(True) == 3
    assert not any(model[i].input_quantizer._disabled for i in (0, 2, 4, 6))


def test_all_groups_are_searched_down_to_the_share(net: Any) -> None:
    model, frames = copy.deepcopy(net[0]), net[1]
    rows = search_ranges(model, frames, share=0.0).rows
    assert {row.modules for row in rows} == {("0",), ("2",), ("4",), ("6",)}
    losses = [row.before_db for row in rows]
    assert losses == sorted(losses)
    for row in rows:
        assert row.after_db >= row.before_db
        assert (row.factor == 1.0) == (row.after_db == row.before_db)
    assert not search_ranges(model, frames, share=1.0).rows


def test_mistakes_are_refused(net: Any) -> None:
    model, frames = net
    with pytest.raises(ValueError, match="expected a share of 0 to 1, got 2"):
        search_ranges(model, frames, share=2)
    with pytest.raises(ValueError, match="there were no batches"):
        search_ranges(model, [])
