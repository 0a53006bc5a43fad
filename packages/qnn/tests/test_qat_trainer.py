"""Quantization-aware training, step by step: sums over samples, ranges that follow or learn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bevquant_qnn import (
    FramePart,
    QatTrainer,
    QuantConfig,
    add_up,
    distillation_loss,
    quantize_model,
    weighted_layers,
)
from bevquant_quantizers import calibrate, named_quantizers

NOTHING = torch.zeros(0)
SAMPLES = torch.randn(6, 1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
Models = tuple[nn.Module, nn.Module]


@pytest.fixture(scope="module")
def calibrated() -> Models:
    """A float net and it in 4 bits."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval()
    quantized = quantize_model(net, QuantConfig(weight_bits=4), SAMPLES[0]).model
    calibrate(quantized, list(SAMPLES))
    return net, quantized


def trainer(calibrated: Models, lr: float = 3e-3, **given: Any) -> QatTrainer:
    net, quantized = copy.deepcopy(calibrated)

    def losses(sample: int) -> list[torch.Tensor]:
        x = SAMPLES[sample % len(SAMPLES)]
        return [distillation_loss(quantized(x), -net(x)), 1e-3 * quantized(x).square().mean()]

    made = QatTrainer(quantized, losses, lambda step: lr, **{"batch": 2, **given})
    made.begin(SAMPLES)
    return made


def ranges(model: nn.Module) -> list[torch.Tensor]:
    return [entry.quantizer.amax.detach().clone() for entry in named_quantizers(model)]


def test_the_loss_falls(calibrated: Models) -> None:
    learning = trainer(calibrated, batch=6, frozen_after=5)
    losses = [sum(learning.step(step)) for step in range(10)]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_a_loss_that_is_no_number_changes_nothing(calibrated: Models) -> None:
    learning = trainer(calibrated)
    learning._losses = lambda sample: [learning.model(SAMPLES[0]).sum() * torch.inf]
    before = [p.detach().clone() for p in learning.model.parameters()]
    with pytest.raises(FloatingPointError, match="step 1: the loss is"):
        learning.step(0)
    assert all(map(torch.equal, before, learning.model.parameters()))


class Headed(nn.Module):
    """Quantized layers, an attention among them, and a head with a norm that stay in float."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.attention = nn.Conv2d(2, 4, 1), nn.MultiheadAttention(4, 2)
        self.head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.conv(x).relu().flatten(2).transpose(1, 2)
        scores: torch.Tensor = self.head(self.attention(rows, rows, rows)[0].flatten(0, 1))
        return scores


@pytest.mark.parametrize("train_float", [False, True])
def test_layers_left_in_float_are_frozen(train_float: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Headed().eval()
    config = QuantConfig(exclude=("head",), weight_bits=4)
    model: Any = quantize_model(net, config, SAMPLES[0]).model
    calibrate(model, list(SAMPLES))
    before = copy.deepcopy(model.state_dict())

    def losses(sample: int) -> list[torch.Tensor]:
        return [(model(SAMPLES[sample % 6]) - 1).square().mean()]

    training = QatTrainer(model, losses, lambda step: 1e-2, train_float=train_float)
    training.step(0)
    trained = training.finish()
    changed = {n for n, t in trained.state_dict().items() if not torch.equal(t, before[n])}
    quantized = {
        "conv.weight", "conv.bias", "attention.in_proj_weight", "attention.in_proj_bias",
        "attention.out_proj.weight", "attention.out_proj.bias",
    }  # fmt: skip
    in_float = {n for n in before if n.startswith("head.")}
    assert changed - {n for n in changed if "quantizer" in n} == (
        quantized | in_float if train_float else quantized
    )
    assert all(parameter.requires_grad for parameter in trained.parameters())


def test_without_quantized_layers_there_is_nothing_to_train() -> None:
    with pytest.raises(ValueError, match=r"no quantized layer .*train_float=True"):
        QatTrainer(nn.Linear(2, 2), lambda sample: [], lambda step: 1.0)


def part(seed: int, scale: float = 1.0) -> FramePart:
    generator = torch.Generator().manual_seed(seed)
    gradient = scale * torch.randn(1000, generator=generator)
    return FramePart(torch.tensor([1.0 + seed, 2.0]), gradient, NOTHING)


def test_gradients_are_added_from_the_first_sample_to_the_last() -> None:
    parts = [part(seed, 10.0**seed) for seed in range(5)]
    total = add_up(part for part in parts)
    first, *rest = (p.gradient.numpy() for p in parts)
    wanted = first.copy()
    for gradient in rest:
        wanted = wanted + gradient  # float32, one rounding each
    assert (total.gradient.numpy() == wanted / 5).all()
    torch.testing.assert_close(total.losses, torch.tensor([3.0, 2.0]))
    backwards = add_up(reversed(parts)).gradient
    assert not torch.equal(backwards, total.gradient)  # else the order would not be tested


def test_the_parts_stay_as_they_are() -> None:
    parts = [part(0), part(1)]
    before = [p.gradient.clone() for p in parts]
    add_up(parts)
    assert all(torch.equal(p.gradient, old) for p, old in zip(parts, before, strict=True))


def test_no_samples_have_no_mean() -> None:
    with pytest.raises(ValueError, match="no samples"):
        add_up([])


@pytest.mark.parametrize("learned", [False, True])
def test_ranges_stand_still_after_the_step_that_was_set(calibrated: Models, learned: bool) -> None:
    learning = trainer(calibrated, batch=1, frozen_after=1, learn=learned)
    seen = [ranges(learning.model)]
    weights = [learning._weights[0].detach().clone()]
    with torch.random.fork_rng():
        for step in range(3):
            learning.step(step)
            seen.append(ranges(learning.model))
            weights.append(learning._weights[0].detach().clone())
    assert not all(map(torch.equal, seen[0], seen[1]))
    assert all(map(torch.equal, seen[1], seen[2]))
    assert all(map(torch.equal, seen[1], seen[3]))
    assert not torch.equal(weights[2], weights[3])  # the weights go on


def test_weights_stay_within_ranges_that_stand_still(calibrated: Models) -> None:
    learning = trainer(calibrated, batch=1, frozen_after=0, lr=2e-2)
    with torch.random.fork_rng():
        for step in range(2):
            learning.step(step)
    layers = weighted_layers(learning.model)
    beyond = [bool((w.weight_to_quantize().abs() > w.weight_quantizer.amax).any()) for w in layers]
    assert any(beyond)  # training pushed them out
    before = [layer.quantized_weight().detach() for layer in layers]
    after = weighted_layers(learning.finish())
    for layer, old in zip(after, before, strict=True):
        assert torch.equal(layer.quantized_weight(), old)
        amax = layer.weight_quantizer.amax
        assert bool((layer.weight_to_quantize().abs() <= amax).all())
        assert float((old / amax.clamp(min=1e-9) * 7).min()) >= -7.001  # of 4 bits −8 is left out
        assert not layer.weight_quantizer.narrow_range


def test_ranges_stay_as_calibrated_where_that_is_asked(calibrated: Models) -> None:
    learning = trainer(calibrated, frozen_after=0)
    before = ranges(learning.model)
    with torch.random.fork_rng():
        learning.step(0)
    assert all(map(torch.equal, before, ranges(learning.model)))
