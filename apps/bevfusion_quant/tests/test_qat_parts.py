"""The parts of quantization-aware training: sums over frames, ranges, settings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bevfusion_quant import InputError
from bevfusion_quant.qat import FramePart, QatConfig, RangeFollower, add_up
from bevquant_qnn import QuantConfig, quantize_model
from bevquant_quantizers import calibrate, named_quantizers

NOTHING = torch.zeros(0)


def part(seed: int, scale: float = 1.0) -> FramePart:
    generator = torch.Generator().manual_seed(seed)
    gradient = scale * torch.randn(1000, generator=generator)
    return FramePart(torch.tensor([1.0 + seed, 2.0]), gradient, NOTHING)


def test_gradients_are_added_from_the_first_frame_to_the_last() -> None:
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


def test_no_frames_have_no_mean() -> None:
    with pytest.raises(ValueError, match="no frames"):
        add_up([])


def small_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 1))
    images = torch.randn(4, 2, 8, 8)
    model = quantize_model(net, QuantConfig(weight_bits=4), images).model
    calibrate(model, [images], method="percentile", percentile=90.0)
    return model


def ranges(model: nn.Module) -> dict[str, torch.Tensor]:
    return {entry.name: entry.quantizer.amax.clone() for entry in named_quantizers(model)}


def test_a_range_keeps_its_share_of_the_largest_value() -> None:
    model = small_net()
    calibrated = ranges(model)
    follower = RangeFollower(model)
    frame = torch.randn(1, 2, 8, 8)
    frame *= 4.0 / frame.abs().max()
    model(frame)
    follower.start([follower.take()])
    assert follower.first[0] == 4.0
    model(frame / 2)
    model(frame)  # one frame may use a quantizer more than once: the largest value counts
    seen = follower.take()
    assert seen[0] == 4.0
    mean = 4.0
    for largest in (8.0, 0.0, 2.0):  # a frame without values tells nothing
        follower.follow([torch.full_like(seen, largest)])
        mean = mean if largest == 0 else 0.99 * mean + 0.01 * largest
    wanted = float(calibrated["0._input_quantizer"]) * mean / 4.0
    assert float(model[0].input_quantizer.amax) == pytest.approx(wanted, rel=1e-5)
    assert wanted != pytest.approx(mean, rel=0.05)  # the maximum itself would be another range


def test_a_weights_range_follows_its_channel() -> None:
    model = small_net()
    model[0].weight_quantizer.amax = model[0].weight_quantizer.amax * 0.8
    calibrated = ranges(model)
    follower = RangeFollower(model)
    with torch.no_grad():
        model[0].weight[1] *= 3
        model[0].weight[2] = 0
    follower.follow([])
    share = ranges(model)["0._weight_quantizer"] / calibrated["0._weight_quantizer"]
    torch.testing.assert_close(share.flatten(), torch.tensor([1.0, 3.0, 1.0]))


def test_quantizers_that_are_off_or_stopped_are_left_alone() -> None:
    model = small_net()
    model[0].input_quantizer.disable()
    calibrated = ranges(model)
    follower = RangeFollower(model)
    model(torch.randn(1, 2, 8, 8))
    maxima = follower.take()
    assert len(maxima) == 1  # the second layer's input
    follower.stop()
    model(torch.randn(1, 2, 8, 8))
    assert (follower.take() == 0).all()
    follower.start([maxima])
    follower.follow([2 * maxima])
    assert ranges(model)["0._input_quantizer"] == calibrated["0._input_quantizer"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"steps": 0}, "--steps 0: it must be at least 1"),
        ({"steps": -3}, "--steps -3"),
        ({"batch": 0}, "--batch 0"),
        ({"lr": 0.0}, "--lr 0.0: it must be above 0"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"clip": -1.0}, "--clip"),
        ({"weight_decay": 1.0}, "--weight-decay"),
        ({"distill": -1.0}, "--distill -1.0: it must be a weight from 0 up"),
        ({"seed": -1}, "--seed -1"),
        ({"freeze_after": -1}, "--freeze-after -1"),
        ({"freeze_after": 0, "learn_ranges": True}, "leave one of the two out"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], told: str) -> None:
    with pytest.raises(InputError, match=told):
        QatConfig(**settings)
