"""Layers in block formats: plans, values, comparison, files, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_int8sim import IntegerModel, compare, simulate
from bevquant_int8sim.program import BlockLayer, blocks_round
from bevquant_qnn import (
    PrecisionPlan,
    apply_precision,
    learn_ranges,
    quantize_model,
    sensitivity,
    weight_size,
)
from bevquant_quantizers import calibrate, fake_quantize_blocks, quantize_blocks

FORMATS = ("mxfp8", "mxfp4", "nvfp4")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 40, 3, padding=1)
        self.mix = nn.Conv2d(40, 48, 1)
        self.head = nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.stem(x).relu()).relu()
        return self.head(x.permute(0, 2, 3, 1))


def planned(plan: dict[str, Any], default: Any = "int8") -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6)
    model = quantize_model(Net().eval(), example_inputs=x).model
    calibrate(model, [x], method="mse")
    apply_precision(model, PrecisionPlan.by_hand(model, plan, default))
    return model, x


@pytest.mark.parametrize("name", FORMATS)
def test_layers_compute_with_the_formats_values(name: str, tmp_path: Path) -> None:
    model, x = planned({"mix": name, "head": name})
    simulated = simulate(model, x)
    layers = {s.path: s.target for s in simulated.steps if isinstance(s.target, BlockLayer)}
    assert list(layers) == ["mix", "head"]
    given = torch.randn(5, 40, 6, 6)
    mix: Any = model.mix
    amax = mix.input_quantizer.amax
    read = fake_quantize_blocks(given, name, amax, axis=1)
    weight = fake_quantize_blocks(mix.weight, name, mix.weight_quantizer.amax, axis=1)
    wanted = torch.einsum("bihw,oi->bohw", read.double(), weight.flatten(1).double())
    wanted = (wanted + mix.bias.double()[:, None, None]).float()
    scale = float(amax) if name == "nvfp4" else 0.0
    made = layers["mix"](blocks_round(given, scale, name, 1))
    torch.testing.assert_close(made, wanted, rtol=1e-6, atol=0)
    # The fake-quantized model rounds sums in float32, and a few values to the other number.
    apart = (simulated(x) - model(x)).abs().detach()
    assert float((apart > 1e-6).float().mean()) < 0.1
    assert float(apart.max()) < 0.05
    table = compare(Net().eval(), simulated, [x])
    assert {row.form for row in table.rows} >= {name, "int8"}
    simulated.save(tmp_path / "saved")
    loaded = IntegerModel.load(tmp_path / "saved")
    assert torch.equal(loaded(x), simulated(x))
    held: Any = next(s.target for s in loaded.steps if s.path == "mix" and s.target)
    wanted = quantize_blocks(mix.weight, name, mix.weight_quantizer.amax, axis=1)
    for one, other in ((held.blocks, layers["mix"].blocks), (held.blocks, wanted)):
        assert torch.equal(one.numbers, other.numbers)
        assert torch.equal(one.scales, other.scales)
        assert torch.equal(one.tensor_scale, other.tensor_scale)
    compare(model, simulated, [x], verify=True)


def test_a_bound_of_other_sums() -> None:
    model, x = planned({"mix": "mxfp8"})
    layer: Any = next(
        s.target for s in simulate(model, x).steps if isinstance(s.target, BlockLayer)
    )
    given = blocks_round(torch.randn(2, 40, 6, 6), 0.0, "mxfp8", 1)
    single = nn.functional.conv2d(given, layer.weight, layer.bias)
    apart = (single.double() - layer(given).double()).abs()
    assert bool((apart <= layer.bound(given)).all())
    assert float(apart.max()) > 0


def test_finer_formats_lose_less() -> None:
    lost = {}
    for name in ("mxfp8", "nvfp4", "mxfp4"):
        model, x = planned({"mix": name, "head": name}, "float")
        with_float, _ = planned({}, "float")
        lost[name] = float((simulate(model, x)(x) - with_float(x)).detach().norm())
    assert 2 * lost["mxfp8"] < min(lost["nvfp4"], lost["mxfp4"])


def test_a_format_of_input_alone_runs_in_float_and_is_named() -> None:
    model, x = planned({"mix": "mxfp8"})
    model.mix.weight_quantizer.num_bits = 8  # type: ignore[union-attr, operator]
    found = [f.reason for f in simulate(model, x).float_fallbacks if f.path == "mix"]
    assert "its input is mxfp8 and its weight is not: give both num_bits=mxfp8" in found


def test_other_layers_are_refused_and_nothing_changes() -> None:
    model, _ = planned({})
    with pytest.raises(
        ValueError, match="stem: mxfp4 is for linear layers and convolutions of 1×1"
    ):
        apply_precision(model, PrecisionPlan.by_hand(model, {"stem": "mxfp4", "mix": "mxfp8"}))
    assert {q.num_bits for q in (model.mix.input_quantizer, model.stem.input_quantizer)} == {8}  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="stem: nvfp4 is for linear layers"):
        sensitivity(model, [torch.randn(2, 3, 6, 6)], precisions=("nvfp4",))


def test_training_passes_gradients_and_ranges_are_not_learned() -> None:
    model, x = planned({"mix": "nvfp4", "head": "mxfp8"})
    assert len(learn_ranges(model)) == 2  # of the stem
    model(x).square().mean().backward()
    for layer in (model.mix, model.head):
        grad: Any = layer.weight.grad  # type: ignore[union-attr]
        assert float(grad.abs().sum()) > 0
    apply_precision(model, PrecisionPlan.by_hand(model, {"mix": "int8", "head": "int8"}))


def test_sizes_count_the_scales_of_blocks() -> None:
    layer = quantize_model(nn.Sequential(nn.Linear(64, 64, bias=False))).model
    for name, bits in (("mxfp8", 8.25), ("mxfp4", 4.25), ("nvfp4", 4.5)):
        apply_precision(layer, PrecisionPlan.by_hand(layer, {"0": name}))  # type: ignore[dict-item]
        assert weight_size(layer).after == 64 * 64 * bits / 8
