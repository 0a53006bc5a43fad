"""Sparse encoders to export, frames for them, and the comparison with the integer model."""

from __future__ import annotations

import copy
import functools

import spconv.pytorch as spconv
import torch
from torch import fx, nn

from bevquant_fusion import fuse_model
from bevquant_int8sim import simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate
from bevquant_sparse import to_dense, use_bevquant_kernels

GRID = (12, 10, 9)
__all__ = [
    "Encoder", "calibrated", "encoder", "folded", "frame", "hourglass", "mismatches", "simulate",
    "spconv", "switch_off",
]  # fmt: skip
fx.wrap("to_dense")  # spconv's own dense() warns


class Block(spconv.SparseModule):
    def __init__(self, width, key):
        super().__init__()
        self.conv1 = spconv.SubMConv3d(width, width, 3, padding=1, bias=False, indice_key=key)
        self.bn1 = nn.BatchNorm1d(width)
        self.conv2 = spconv.SubMConv3d(width, width, 3, padding=1, bias=False, indice_key=key)
        self.bn2 = nn.BatchNorm1d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.conv1(x)
        out = out.replace_feature(self.relu(self.bn1(out.features)))
        out = self.conv2(out)
        out = out.replace_feature(self.bn2(out.features) + x.features)
        return out.replace_feature(self.relu(out.features))


def chain(conv):
    return spconv.SparseSequential(conv, nn.BatchNorm1d(conv.out_channels), nn.ReLU(inplace=True))


def down(inputs, outputs, key, kernel=3, stride=2, padding=1):
    return chain(
        spconv.SparseConv3d(
            inputs, outputs, kernel, stride, padding=padding, bias=False, indice_key=key
        )
    )


class Encoder(nn.Module):
    """mit-bevfusion's SparseEncoder, with as many stages as there are widths."""

    def __init__(self, widths=(8, 12), grid=GRID, tail="xyz", blocks=2):
        super().__init__()
        self.grid, self.tail = list(grid), tail
        self.conv_input = chain(
            spconv.SubMConv3d(5, widths[0], 3, padding=1, bias=False, indice_key="subm1")
        )
        layers = {}
        for i, width in enumerate(widths, 1):
            members = [Block(width, f"subm{i}") for _ in range(blocks)]
            if i < len(widths):
                padding = (1, 1, 0) if i == 3 else 1
                members.append(down(width, widths[i], f"spconv{i}", padding=padding))
            layers[f"encoder_layer{i}"] = spconv.SparseSequential(*members)
        self.encoder_layers = spconv.SparseSequential(**layers)
        self.conv_out = down(widths[-1], 16, "out", (1, 1, 3), (1, 1, 2), 0)

    def forward(self, features, coords, batch_size):
        x = spconv.SparseConvTensor(features, coords, self.grid, batch_size)
        x = self.conv_out(self.encoder_layers(self.conv_input(x)))
        dense = to_dense(x.features, x.indices, x.spatial_shape, x.batch_size)
        if self.tail == "none":
            return dense
        return dense.permute(0, 1, 4, 2, 3).flatten(1, 2)


class Hourglass(nn.Module):
    """Down and up again; returns a sparse tensor."""

    def __init__(self):
        super().__init__()
        self.stem = chain(spconv.SubMConv3d(5, 8, 3, padding=1, bias=False, indice_key="a"))
        self.down = down(8, 12, "down")
        self.mix = chain(spconv.SubMConv3d(12, 12, 1, bias=False, indice_key="mix"))
        self.up = spconv.SparseInverseConv3d(12, 8, 3, indice_key="down")
        self.last = spconv.SubMConv3d(8, 4, (3, 1, 3), indice_key="last")

    def forward(self, features, coords, batch_size):
        x = spconv.SparseConvTensor(features, coords, list(GRID), batch_size)
        return self.last(self.up(self.mix(self.down(self.stem(x)))))


class SmallKernels(nn.Module):
    """A 1×1×1 convolution, which keeps the rows, and one as wide as its stride, which does not."""

    def __init__(self):
        super().__init__()
        self.stem = chain(spconv.SubMConv3d(5, 8, 3, padding=1, bias=False, indice_key="a"))
        self.point = chain(spconv.SparseConv3d(8, 8, 1, bias=False, indice_key="point"))
        self.halve = spconv.SparseConv3d(8, 4, 2, stride=2, indice_key="halve")

    def forward(self, features, coords, batch_size):
        x = spconv.SparseConvTensor(features, coords, list(GRID), batch_size)
        return self.halve(self.point(self.stem(x)))


def frame(seed, share=0.2, batch_size=1, grid=GRID):
    generator = torch.Generator().manual_seed(seed)
    occupied = torch.rand(batch_size, *grid, generator=generator) < share
    coords = occupied.nonzero().int().contiguous()
    order = torch.randperm(len(coords), generator=generator)
    return torch.randn(len(coords), 5, generator=generator), coords[order], batch_size


def folded(net, example):
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.3, 1.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    use_bevquant_kernels(net)
    return fuse_model(net.eval(), example).model


def calibrated(net, frames, config=None, method="mse"):
    quantized = quantize_model(folded(net, frames[0]), config, example_inputs=frames[0]).model
    calibrate(quantized, frames, forward=lambda m, b: m(*b), method=method)
    return quantized


@functools.cache
def _kept(kind, settings):
    torch.manual_seed(0)
    return calibrated(kind(**dict(settings)), [frame(s) for s in range(2)])


def encoder(**settings):
    return copy.deepcopy(_kept(Encoder, tuple(settings.items())))


def hourglass():
    return copy.deepcopy(_kept(Hourglass, ()))


def small_kernels():
    return copy.deepcopy(_kept(SmallKernels, ()))


def switch_off(model, *paths):
    for path in paths:
        layer = model.get_submodule(path)
        layer._input_quantizer.disable()
        layer._weight_quantizer.disable()
    return model


def mismatches(dump, recorded):
    """Node to values that differ from what the integer model made at the same module."""
    found = {}
    for name, made in dump.items():
        steps = [r for r in recorded.values() if r.path == made.path and r.path]
        if not steps or name.startswith("add") or made.value.dim() != 2:
            continue
        same = [r for r in steps if r.value.dtype == made.value.dtype and r.scale == made.scale]
        assert same, f"{name} holds {made.value.dtype}, {[r.value.dtype for r in steps]}"
        # Of a layer and its ReLU the later one is what the file holds.
        found[name] = int((same[-1].value != made.value).sum())
    return found
