"""Ranges that keep their share of the largest value while weights and activations move."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bevquant_qnn import QuantConfig, RangeFollower, quantize_model
from bevquant_quantizers import calibrate, named_quantizers


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
