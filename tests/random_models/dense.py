"""Random dense models: maps, tokens and vectors."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from random_models.network import Candidate, Function, Network, grow, leave_out, settle

Made = tuple[nn.Module | None, Function] | None


def _map(x: Tensor) -> bool:
    return x.dim() == 4 and min(x.shape[2:]) >= 2


def _layer(build: Callable[[random.Random, int], nn.Module]) -> Callable[..., Made]:
    """A module on maps, of the number of channels."""
    return lambda rng, x: (build(rng, x.shape[1]), lambda m, v: m(v)) if _map(x) else None


def _plain(function: Function, wanted: Callable[[Tensor], bool] = lambda x: True) -> Any:
    """One of torch's functions, where the value has the wanted shape."""
    return lambda rng, x: (None, function) if wanted(x) else None


def _conv(rng: random.Random, channels: int) -> nn.Module:
    kernel = rng.choice([1, 3])
    groups = rng.choice([1, 1, channels])
    out = channels if groups > 1 else rng.choice([4, 6, 8])
    stride, dilation = rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
    return nn.Conv2d(
        channels, out, kernel, stride, kernel // 2 * dilation, dilation, groups,
        bias=rng.random() < 0.6,
    )  # fmt: skip


def _deconv(rng: random.Random, channels: int) -> nn.Module:
    return nn.ConvTranspose2d(channels, rng.choice([4, 6]), 2, 2, bias=rng.random() < 0.5)


def _conv_norm(rng: random.Random, channels: int) -> nn.Module:
    conv = _conv(rng, channels)
    norm = nn.BatchNorm2d(int(conv.out_channels))
    return nn.Sequential(conv, norm, rng.choice([nn.ReLU, nn.SiLU, nn.Identity, nn.ReLU6])())


def _linear(rng: random.Random, x: Tensor) -> Made:
    if x.dim() < 2:
        return None
    return nn.Linear(x.shape[-1], rng.choice([4, 6, 8]), bias=rng.random() < 0.7), lambda m, v: m(v)


def _functional_conv(rng: random.Random, x: Tensor) -> Made:
    if not _map(x):
        return None
    held = nn.Conv2d(x.shape[1], 6, 3)
    return held, lambda m, v: F.conv2d(v, m.weight, m.bias, padding=1)


def _functional_linear(rng: random.Random, x: Tensor) -> Made:
    return nn.Linear(x.shape[-1], 6), lambda m, v: F.linear(v, m.weight, m.bias)


def _layer_norm(rng: random.Random, x: Tensor) -> Made:
    return nn.LayerNorm(x.shape[-1]), lambda m, v: m(v)


def _prelu(rng: random.Random, x: Tensor) -> Made:
    return nn.PReLU(x.shape[1] if x.dim() > 1 else 1), lambda m, v: m(v)


ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.SiLU, nn.GELU, nn.Hardswish, nn.ELU,
    nn.Softplus, nn.Hardsigmoid, nn.Mish,
)  # fmt: skip


def _activation(rng: random.Random, x: Tensor) -> Made:
    return rng.choice(ACTIVATIONS)(), lambda m, v: m(v)


def _function(rng: random.Random, x: Tensor) -> Made:
    return None, rng.choice([
        torch.relu, F.silu, F.gelu, torch.sigmoid, torch.tanh, torch.abs, F.relu6,
        lambda v: v.clamp(-0.8, 0.9), lambda v: v.clamp(min=-0.5), lambda v: F.leaky_relu(v, 0.2),
        lambda v: v * 0.5 + 1, lambda v: 1 - v, lambda v: v / 3, lambda v: -v, lambda v: v**2,
        lambda v: torch.where(v > 0, v, 0.1 * v), lambda v: v.exp().clamp(max=4),
        lambda v: v.masked_fill(v < -0.5, -0.5), lambda v: v.square().mean(-1, True).sqrt(),
    ])  # fmt: skip


def _chunks(rng: random.Random, x: Tensor) -> Made:
    if x.dim() < 2 or x.shape[1] % 2:
        return None
    return None, rng.choice([
        lambda v: torch.cat(v.chunk(2, 1)[::-1], 1),
        lambda v: v.chunk(2, 1)[0] * v.chunk(2, 1)[1].sigmoid(),
        lambda v: sum(v.split(v.shape[1] // 2, 1)),
        lambda v: torch.cat([v[:, ::2], v[:, 1::2]], 1),
        lambda v: v.tensor_split(2, 1)[1], lambda v: v[:, 1:], lambda v: v[:, :-1],
        lambda v: torch.stack(v.unbind(1)[::-1], 1), lambda v: v.roll(1, 1), lambda v: v.flip(1),
        lambda v: v.narrow(1, 1, 1), lambda v: v.index_select(1, torch.tensor([1, 0])),
    ])  # fmt: skip


def _window(rng: random.Random, x: Tensor) -> Made:
    if not _map(x):
        return None
    return None, rng.choice([
        lambda v: F.max_pool2d(v, 2), lambda v: F.avg_pool2d(v, 3, 1, 1),
        lambda v: F.max_pool2d(v, 3, 2, 1, ceil_mode=True), lambda v: F.adaptive_avg_pool2d(v, 1),
        lambda v: F.adaptive_avg_pool2d(v, 2), lambda v: F.avg_pool2d(v, 2, ceil_mode=True),
        lambda v: F.interpolate(v, scale_factor=2.0),
        lambda v: F.interpolate(v, scale_factor=2.0, mode="bilinear", align_corners=False),
        lambda v: F.interpolate(v, size=(6, 6), mode="bilinear", align_corners=True),
        lambda v: F.pad(v, (1, 0, 2, 1)), lambda v: F.pad(v, (1, 1, 1, 1), mode="reflect"),
        lambda v: F.pad(v, (1, 1), mode="replicate"), lambda v: v[..., 1:], lambda v: v[:, :, :-1],
        lambda v: F.pixel_unshuffle(v[:, :, : v.shape[2] // 2 * 2, : v.shape[3] // 2 * 2], 2),
        lambda v: v.transpose(2, 3), lambda v: v * v.mean((2, 3), keepdim=True).sigmoid(),
        lambda v: v.flatten(2).transpose(1, 2), lambda v: v.permute(0, 2, 3, 1),
        lambda v: v.mean((2, 3)), lambda v: v.amax((2, 3)), lambda v: v.flatten(1)[:, :16],
        lambda v: F.unfold(v, 2, stride=2).transpose(1, 2),
    ])  # fmt: skip


def _tokens(rng: random.Random, x: Tensor) -> Made:
    if x.dim() != 3:
        return None
    return None, rng.choice([
        lambda v: v.softmax(-1), lambda v: (v @ v.transpose(1, 2) * 0.3).softmax(-1) @ v,
        lambda v: torch.einsum("bnc,bmc->bnm", v, v) * 0.2, lambda v: v.mean(1), lambda v: v[:, 0],
        lambda v: F.scaled_dot_product_attention(v, v, v), lambda v: F.normalize(v, dim=-1),
        lambda v: v.transpose(1, 2), lambda v: v.max(1)[0], lambda v: v.cumsum(1) * 0.1,
        lambda v: v - v.logsumexp(-1, keepdim=True), lambda v: v.unsqueeze(1),
        lambda v: v.transpose(1, 2).unflatten(2, (-1, 1)), lambda v: v.topk(2, dim=-1).values,
    ])  # fmt: skip


def _pair(rng: random.Random, x: Tensor, y: Tensor) -> Made:
    if x.shape == y.shape:
        return None, rng.choice([
            lambda a, b: a + b, lambda a, b: torch.cat([a, b], 1), lambda a, b: a * b,
            lambda a, b: (a + b).relu(), lambda a, b: a - b, torch.maximum,
            lambda a, b: torch.where(a > b, a, b), lambda a, b: torch.stack([a, b], 1).mean(1),
            lambda a, b: torch.cat((a, b, a), -1),
        ])  # fmt: skip
    if _map(x) and _map(y):
        return None, lambda a, b: torch.cat([a, F.interpolate(b, size=a.shape[2:])], 1)
    if x.dim() == y.dim() == 3 and x.shape[2] == y.shape[1]:
        return None, lambda a, b: a @ b
    return None, lambda a, b: a + b  # broadcast, where that is possible


def _group_norm(rng: random.Random, channels: int) -> nn.Module:
    return nn.GroupNorm(2 if channels % 2 == 0 else 1, channels)


CANDIDATES = (
    Candidate("conv", _layer(_conv)), Candidate("block", _layer(_conv_norm)),
    Candidate("block", _layer(_conv_norm)), Candidate("deconv", _layer(_deconv)),
    Candidate("norm", _layer(lambda rng, c: nn.BatchNorm2d(c))),
    Candidate("group_norm", _layer(_group_norm)), Candidate("layer_norm", _layer_norm),
    Candidate("pool", _layer(lambda rng, c: rng.choice([nn.MaxPool2d(2), nn.AvgPool2d(2)]))),
    Candidate("linear", _linear), Candidate("functional_linear", _functional_linear),
    Candidate("functional_conv", _functional_conv), Candidate("prelu", _prelu),
    Candidate("activation", _activation), Candidate("function", _function),
    Candidate("chunks", _chunks), Candidate("window", _window), Candidate("tokens", _tokens),
    Candidate("pair", _pair, 2), Candidate("pair", _pair, 2),
)  # fmt: skip


def make(seed: int, skipped: Collection[int] = ()) -> tuple[Network, list[tuple[Tensor, ...]]]:
    """A model, and batches for it: two of one size, then another batch and another size."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    sizes = [(2, 6, 8, 8), (2, 6, 8, 8), (3, 6, 8, 8), (1, 6, 12, 10)]
    batches = [(torch.randn(size, generator=generator),) for size in sizes]
    steps, parts, returned = grow(rng, CANDIDATES, batches[0][0], rng.randint(3, 9))
    return settle(Network(leave_out(steps, skipped), parts, returned), generator), batches
