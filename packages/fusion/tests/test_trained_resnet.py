"""A ResNet-20 trained on CIFAR-10, folded, on real images."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bevquant_fusion import fuse_model


def data(*parts):
    root = os.environ.get("BEVQUANT_DATA")
    base = Path(root) if root else Path(__file__).parents[4] / "shared" / "data"
    path = base.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"real data is not here: {'/'.join(parts)} (set BEVQUANT_DATA)")
    return path


class Shortcut(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.pad = channels // 4

    def forward(self, x):
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))


class Block(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.bn2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.shortcut = nn.Sequential() if i == o else Shortcut(o)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet20(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        widths = ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        for n, (i, o, stride) in enumerate(widths, start=1):
            blocks = [Block(i, o, stride), Block(o, o, 1), Block(o, o, 1)]
            setattr(self, f"layer{n}", nn.Sequential(*blocks))
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        out = F.avg_pool2d(out, out.size()[3])
        return self.linear(out.view(out.size(0), -1))


@pytest.fixture
def network():
    weights = data("akamaster_resnet_cifar10", "resnet20-12fca82f.th")
    state = torch.load(weights, map_location="cpu", weights_only=True)["state_dict"]
    net = ResNet20()
    net.load_state_dict({k.removeprefix("module."): v for k, v in state.items()})
    return net.eval()


@pytest.fixture
def images():
    with np.load(data("cifar10", "cifar10_jpg_subset.npz")) as archive:
        chosen = archive["is_test"].nonzero()[0][:200]
        pixels = torch.from_numpy(archive["images"][chosen]).permute(0, 3, 1, 2).double() / 255
        labels = torch.from_numpy(archive["labels"][chosen])
    mean = torch.tensor([0.485, 0.456, 0.406]).double().view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).double().view(3, 1, 1)
    return (pixels - mean) / std, labels


def test_folded_in_float64(network, images, error_of):
    x, labels = images
    network.double()
    result = fuse_model(network, x[:2])
    assert len(result.fused) == 19
    assert result.skipped == ()
    with torch.no_grad():
        expected, actual = network(x), result.model(x)
    assert (expected.argmax(1) == labels).double().mean() > 0.7
    assert torch.equal(actual.argmax(1), expected.argmax(1))
    assert error_of(actual, expected) <= 1e-10


def test_folded_in_float32_keeps_every_class(network, images):
    x = images[0].float()
    result = fuse_model(network, x[:2])
    with torch.no_grad():
        assert torch.equal(result.model(x).argmax(1), network(x).argmax(1))
    assert 0 < result.max_error < 1e-4
