"""Public networks with trained weights, and the images that judge them.

ResNet-20 of akamaster/pytorch_resnet_cifar10 on CIFAR-10 (re-encoded as JPEG, so 81 % and not 92),
and the MNIST net of the ONNX model zoo. Both lie in the folder that `BEVQUANT_DATA` names, else in
`shared/data` beside the checkout.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DATA = Path(
    os.environ.get("BEVQUANT_DATA") or Path(__file__).parent.parent.parent / "shared" / "data"
)


@dataclass(frozen=True)
class Task:
    """A trained network; images to calibrate or train with, and images that judge."""

    name: str
    make: Callable[[], nn.Module]
    calibration: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.halved = stride != 1
        self.padding = (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.halved:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))
        return self.relu2(out + x)


class ResNet20(nn.Module):
    """The CIFAR ResNet of He et al. (2015), section 4.2, shortcuts without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        inputs = 16
        for i, width in enumerate((16, 32, 64), 1):
            strides = (1 if i == 1 else 2, 1, 1)
            blocks = [_Block(inputs if s == 2 else width, width, s) for s in strides]
            inputs = width
            setattr(self, f"layer{i}", nn.Sequential(*blocks))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


class MnistNet(nn.Module):
    """The zoo's MNIST net: two convolutions and a linear layer, without batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 5, 1, 2), nn.Conv2d(8, 16, 5, 1, 2)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.pool1, self.pool2 = nn.MaxPool2d(2), nn.MaxPool2d(3)
        self.linear = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool1(self.relu1(self.conv1(x)))
        x = self.pool2(self.relu2(self.conv2(x)))
        return self.linear(x.flatten(1))


def resnet20() -> nn.Module:
    """ResNet-20 with its trained weights."""
    path = DATA / "akamaster_resnet_cifar10" / "resnet20-12fca82f.th"
    saved = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
    model = ResNet20()
    model.load_state_dict({k.removeprefix("module."): v for k, v in saved.items()})
    return model.eval()


def mnist_net() -> nn.Module:
    """The MNIST net with its trained weights, read from the ONNX file's constants."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(DATA / "onnx_models" / "mnist" / "model.onnx").graph
    found = {
        node.output[0]: torch.from_numpy(numpy_helper.to_array(node.attribute[0].t).copy())
        for node in graph.node
        if node.op_type == "Constant" and node.attribute[0].name == "value"
    }
    found |= {i.name: torch.from_numpy(numpy_helper.to_array(i).copy()) for i in graph.initializer}
    by_size = {}
    for value in found.values():
        by_size.setdefault(value.numel(), value)
    model = MnistNet()
    # Every constant has a size of its own; the linear weight is stored [inputs, outputs].
    for layer in (model.conv1, model.conv2):
        layer.weight.data = by_size[layer.weight.numel()].reshape(layer.weight.shape)
        layer.bias.data = by_size[layer.bias.numel()].reshape(-1)
    model.linear.weight.data = by_size[2560].reshape(256, 10).T.contiguous()
    model.linear.bias.data = by_size[10].reshape(-1)
    return model.eval()


def cifar10(count: int | None = None) -> Task:
    """ResNet-20, the 1,000 training images and `count` (else all 2,000) test images."""
    with np.load(DATA / "cifar10" / "cifar10_jpg_subset.npz") as file:
        images, labels, is_test = file["images"], file["labels"], file["is_test"]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = ((torch.from_numpy(images).float() / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()
    y, test = torch.from_numpy(labels), torch.from_numpy(is_test)
    held_out = (x[test][:count], y[test][:count])
    return Task("ResNet-20, CIFAR-10", resnet20, (x[~test], y[~test]), held_out)


def mnist(count: int | None = None) -> Task:
    """The MNIST net, the first 1,000 digits to calibrate with, `count` others (else 9,000)."""
    folder = DATA / "mnist_t10k"
    with gzip.open(folder / "t10k-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    with gzip.open(folder / "t10k-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    x, y = torch.from_numpy(pixels.astype(np.float32)), torch.from_numpy(labels.astype(np.int64))
    return Task("MNIST net", mnist_net, (x[:1000], y[:1000]), (x[1000:][:count], y[1000:][:count]))


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 250) -> float:
    """Share of images whose largest output is their label, in percent."""
    right = 0
    for x, y in zip(images.split(batch), labels.split(batch), strict=True):
        right += int((model(x).argmax(1) == y).sum())
    return 100 * right / len(labels)
