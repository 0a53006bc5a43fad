"""ResNet-20 with public weights, and images; tests skip without them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

DATA = Path(os.environ.get("BEVQUANT_DATA") or Path(__file__).parents[4] / "shared" / "data")
WEIGHTS = DATA / "akamaster_resnet_cifar10" / "resnet20-12fca82f.th"
IMAGES = DATA / "cifar10" / "cifar10_jpg_subset.npz"


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.added = (outputs - inputs) // 2

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.added:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.added, self.added))
        return F.relu(out + x)


class ResNet20(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16), Block(16, 16), Block(16, 16))
        self.layer2 = nn.Sequential(Block(16, 32), Block(32, 32), Block(32, 32))
        self.layer3 = nn.Sequential(Block(32, 64), Block(64, 64), Block(64, 64))
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return self.linear(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def _require_data():
    if not WEIGHTS.exists() or not IMAGES.exists():
        pytest.skip(f"no trained ResNet-20 and CIFAR-10 images in {DATA}")


def resnet20():
    """The float model, batch norm and all."""
    _require_data()
    saved = torch.load(WEIGHTS, weights_only=True, map_location="cpu")["state_dict"]
    model = ResNet20()
    model.load_state_dict({name.removeprefix("module."): v for name, v in saved.items()})
    return model.eval()


def images(count, *, test):
    """The first `count` training or test images, normalised, and their labels."""
    _require_data()
    with np.load(IMAGES) as file:
        chosen = np.flatnonzero(file["is_test"] == test)
        chosen = chosen[:: len(chosen) // count][:count]  # all classes
        pixels, labels = file["images"][chosen], file["labels"][chosen]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = (torch.from_numpy(pixels).float() / 255 - mean) / std
    return x.permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)
