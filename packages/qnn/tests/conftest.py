"""Networks and oracles of the tests; nothing here uses the package under test."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn


@pytest.fixture(scope="session")
def upstream():
    """pytorch_quantization, the implementation that the dense modules are compared with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = pytest.importorskip(
            "pytorch_quantization", reason="pytorch-quantization is not installed"
        )
        importlib.import_module("pytorch_quantization.nn")
        # Its own logger alone: absl's set_verbosity silences every other one too.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        return package


def fake_quant_reference(values, amax, *, bits=8, narrow=False):
    """clamp(round(v / s), low, high)·s in float64, s = amax / high, round half to even."""
    values, amax = np.asarray(values, np.float64), np.asarray(amax, np.float64)
    high = 2 ** (bits - 1) - 1
    low = -high if narrow else -high - 1
    scale = amax / high
    safe = np.where(scale > 0, scale, 1.0)
    return np.clip(np.rint(values / safe), low, high) * scale


@pytest.fixture(scope="session")
def reference():
    return fake_quant_reference


class Bottleneck(nn.Module):
    def __init__(self, inputs, mid, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, mid, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(mid)
        self.conv2 = nn.Conv2d(mid, mid, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(mid)
        self.conv3 = nn.Conv2d(mid, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ConcatFPN(nn.Module):
    """Top-down neck that concatenates each level with the upsampled one above it."""

    def __init__(self, channels, outputs):
        super().__init__()
        self.lateral_convs = nn.ModuleList()
        self.fpn_convs = nn.ModuleList()
        for i in range(len(channels) - 1):
            above = channels[i + 1] if i == len(channels) - 2 else outputs
            self.lateral_convs.append(_conv_relu(channels[i] + above, outputs, 1))
            self.fpn_convs.append(_conv_relu(outputs, outputs, 3))

    def forward(self, inputs):
        laterals = [inputs[0], inputs[1], inputs[2]]
        for i in range(1, -1, -1):
            x = F.interpolate(laterals[i + 1], size=laterals[i].shape[2:], mode="nearest")
            laterals[i] = torch.cat([laterals[i], x], dim=1)
            laterals[i] = self.lateral_convs[i](laterals[i])
            laterals[i] = self.fpn_convs[i](laterals[i])
        return laterals[0], laterals[1]


def _conv_relu(inputs, outputs, size):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, padding=size // 2),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class ResNetFPN(nn.Module):
    """Attribute names of its own, so that nothing can be wired by name."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.squeeze = nn.MaxPool2d(3, 2, 1)
        self.deep = nn.Sequential(Bottleneck(8, 4, 16), Bottleneck(16, 4, 16))
        self.deeper = nn.Sequential(Bottleneck(16, 4, 16, 2), Bottleneck(16, 4, 16))
        self.deepest = nn.Sequential(Bottleneck(16, 4, 16, 2))
        self.neck = ConcatFPN([16, 16, 16], 8)

    def forward(self, x):
        a = self.deep(self.squeeze(self.stem(x)))
        b = self.deeper(a)
        return self.neck([a, b, self.deepest(b)])


class WindowAttention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        self.bias = nn.Parameter(torch.zeros(2, 16, 16))

    def forward(self, x, mask=None):
        batch, tokens, channels = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, 2, channels // 2).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attention = q @ k.transpose(-2, -1) + self.bias
        if mask is not None:
            attention = attention + mask.unsqueeze(1)
        x = (attention.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, channels)
        return self.proj(x)


class SwinBlock(nn.Module):
    def __init__(self, channels, shift):
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.attn = WindowAttention(channels)
        self.norm2 = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels)
        )
        self.shift = shift

    def forward(self, x, size):
        height, width = size
        batch, tokens, channels = x.shape
        shortcut = x
        x = self.norm1(x).view(batch, height, width, channels)
        if self.shift:
            x = torch.roll(x, (-2, -2), (1, 2))
        x = x.view(batch, height // 4, 4, width // 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
        mask = torch.zeros(batch * height * width // 16, 16, 16) if self.shift else None
        x = self.attn(x.contiguous().view(-1, 16, channels), mask=mask)
        x = x.view(batch, height // 4, width // 4, 4, 4, channels).permute(0, 1, 3, 2, 4, 5)
        x = x.contiguous().view(batch, height, width, channels)
        if self.shift:
            x = torch.roll(x, (2, 2), (1, 2))
        x = shortcut + x.view(batch, tokens, channels)
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.LayerNorm(4 * channels)
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x, size):
        height, width = size
        batch, _, channels = x.shape
        x = x.view(batch, height, width, channels)
        corners = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return self.reduction(self.norm(torch.cat(corners, -1).view(batch, -1, 4 * channels)))


class SwinNet(nn.Module):
    """Window attention, layer norm, patch merging, and a neck that reads one map three times."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, 4)
        self.stage1 = nn.ModuleList([SwinBlock(8, False), SwinBlock(8, True)])
        self.merge = PatchMerging(8)
        self.stage2 = nn.ModuleList([SwinBlock(16, False)])
        self.up = nn.Conv2d(16, 8, 1)
        self.skip = nn.Conv2d(8, 8, 1)
        self.head = nn.Conv2d(16, 4, 1)
        self.aux = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        x = self.patch_embed(x)
        batch, channels, height, width = x.shape
        x = x.flatten(2).transpose(1, 2)
        for block in self.stage1:
            x = block(x, (height, width))
        low = x.transpose(1, 2).reshape(batch, channels, height, width)
        y = self.merge(x, (height, width))
        for block in self.stage2:
            y = block(y, (height // 2, width // 2))
        y = y.transpose(1, 2).reshape(batch, 2 * channels, height // 2, width // 2)
        aux = self.aux(y)
        z = torch.cat([self.skip(low), F.interpolate(self.up(y), scale_factor=2.0)], 1)
        return self.head(z), aux


@pytest.fixture(scope="session")
def nets():
    return SimpleNamespace(
        Bottleneck=Bottleneck, ConcatFPN=ConcatFPN, ResNetFPN=ResNetFPN, SwinNet=SwinNet
    )


@pytest.fixture(scope="session")
def sparse_nets(spconv):
    """Sparse classes, made here because their base class comes from spconv."""

    class SparseBasicBlock(spconv.SparseModule):
        def __init__(self, channels, key):
            super().__init__()
            self.conv1 = spconv.SubMConv3d(channels, channels, 3, padding=1, indice_key=key)
            self.conv2 = spconv.SubMConv3d(channels, channels, 3, padding=1, indice_key=key)
            self.relu = nn.ReLU()

        def forward(self, x):
            identity = x.features
            out = self.conv1(x)
            out = out.replace_feature(self.relu(out.features))
            out = self.conv2(out)
            out = out.replace_feature(out.features + identity)
            return out.replace_feature(self.relu(out.features))

    class SparseEncoder(nn.Module):
        """mit-bevfusion's names and nesting, batch norms folded, narrow channels."""

        def __init__(self, inputs=5, widths=(4, 8, 8, 8)):
            super().__init__()
            self.grid = [16, 16, 17]
            self.conv_input = _chain(
                spconv.SubMConv3d(inputs, widths[0], 3, padding=1, indice_key="subm1")
            )
            layers = {}
            for i, width in enumerate(widths, 1):
                members = [SparseBasicBlock(width, f"subm{i}"), SparseBasicBlock(width, f"subm{i}")]
                if i < len(widths):
                    down = spconv.SparseConv3d(
                        width, widths[i], 3, 2, padding=1, indice_key=f"spconv{i}"
                    )
                    members.append(_chain(down))
                layers[f"encoder_layer{i}"] = spconv.SparseSequential(*members)
            self.encoder_layers = spconv.SparseSequential(**layers)
            self.conv_out = _chain(
                spconv.SparseConv3d(widths[-1], widths[-1], (1, 1, 3), (1, 1, 2), indice_key="out")
            )

        def forward(self, features, coordinates, batch_size):
            x = spconv.SparseConvTensor(features, coordinates.int(), self.grid, batch_size)
            x = self.conv_input(x)
            for layer in self.encoder_layers:
                x = layer(x)
            dense = self.conv_out(x).dense()
            n, c, h, w, d = dense.shape
            return dense.permute(0, 1, 4, 2, 3).reshape(n, c * d, h, w)

    def _chain(conv):
        return spconv.SparseSequential(conv, nn.ReLU())

    return SimpleNamespace(SparseBasicBlock=SparseBasicBlock, SparseEncoder=SparseEncoder)


@pytest.fixture(scope="session")
def cloud(spconv):
    """Make a random sparse tensor: (channels, spatial shape) -> SparseConvTensor."""

    def make(channels, shape=(9, 8, 7), *, batch=2, share=0.15, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        occupied = torch.rand(batch, *shape, generator=generator) < share
        indices = occupied.nonzero().int().contiguous()
        features = torch.randn(len(indices), channels, generator=generator).to(dtype)
        return spconv.SparseConvTensor(features, indices, list(shape), batch)

    return make


@pytest.fixture(scope="session")
def trained():
    """The module beside this file: ResNet-20 and CIFAR-10 images."""
    path = Path(__file__).with_name("trained_nets.py")
    spec = importlib.util.spec_from_file_location("trained_nets", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
