"""The model and the frame that are given stay as they were, and folds can be trained."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bevquant_fusion import fuse_conv_bn, fuse_model, fuse_parts


class Tracks(nn.Module):
    """Adds what it remembers of the frame before, and writes into the frame."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("prev", torch.zeros(1))
        self.frames = 0

    def forward(self, frame):
        frame["features"] = self.bn(self.conv(frame["image"])) + self.prev
        self.prev.copy_(frame["image"].mean().reshape(1))
        self.frames += 1
        frame["image"] = frame["features"]
        return frame["features"]


@pytest.mark.parametrize("inplace", [False, True])
def test_a_model_with_state_is_fused_and_its_state_kept(inplace):
    net, frame = Tracks().eval(), {"image": torch.randn(1, 3, 8, 8)}
    image = frame["image"].clone()
    result = fuse_model(net, (frame,), inplace=inplace)
    assert len(result.fused) == 1
    assert result.max_error < 1e-5
    for model in (net, result.model):
        assert model.frames == 0
        assert model.prev == 0
    assert frame.keys() == {"image"}
    assert torch.equal(frame["image"], image)


def test_parts_are_folded_on_the_frame_before_it_is_written_to():
    net, frame = nn.Sequential(Tracks()).eval(), {"image": torch.randn(1, 3, 8, 8)}
    result = fuse_parts(net, (frame,), ["0"])
    assert len(result.fused) == 1
    assert net[0].frames == result.model[0].frames == 0
    assert frame.keys() == {"image"}


def test_folds_made_in_inference_mode_train():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(1, 3, 8, 8)
    with torch.inference_mode():
        folded = [
            fuse_model(net, x).model,
            fuse_model(copy.deepcopy(net), x, inplace=True).model,
            fuse_parts(nn.Sequential(net), (x,), ["0"]).model,
            fuse_conv_bn(net[0], net[1]),
        ]
    for model in folded:
        model(x).sum().backward()
        assert all(p.grad is not None and not p.is_inference() for p in model.parameters())


def test_attributes_that_autograd_computed_are_copied():
    """As anchors that a constructor derives from an embedding."""

    class Anchored(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
            self.anchors = nn.Embedding(1, 4)
            self.register_buffer("grid", self.anchors.weight.sigmoid()[..., None, None])

        def forward(self, x):
            return self.bn(self.conv(x)) * self.grid

    net, x = Anchored().eval(), torch.randn(1, 3, 4, 4)
    for example in (x, None):
        result = fuse_model(net, example)
        assert len(result.fused) == 1
        torch.testing.assert_close(result.model(x), net(x))
    assert not net.grid.is_leaf
