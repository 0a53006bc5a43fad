"""Seeded random weights that behave: no layer dies, none explodes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from bevfusion_quant.model._branch import BEVFusion

__all__ = ["random_weights"]


def random_weights(model: BEVFusion, features: Tensor, coords: Tensor, *, seed: int = 0) -> None:
    """Fill `model` in place with random weights whose BatchNorms fit the given frame.

    Convolutions are normal with the standard deviation √(2 / (kernel volume · in channels)) of He
    et al. 2015; BatchNorm weights lie in [0.5, 1.5], biases are normal around 0.5 with deviation
    0.1 (so that most values pass the ReLUs), and running mean and variance are those of the frame,
    layer after layer, in one forward pass. The same seed and frame give the same weights.

    Args:
        model: Changed in place; left in eval mode.
        features: float [voxels, channels] of one frame.
        coords: int32 [voxels, 4].
        seed: Any integer.
    """
    generator = torch.Generator().manual_seed(seed)
    hooks = []
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.weight.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
                module.bias.copy_(torch.randn(module.num_features, generator=generator) * 0.1 + 0.5)
                hooks.append(module.register_forward_pre_hook(_fit))
            elif isinstance(weight := getattr(module, "weight", None), Tensor):
                fan_in = weight[0].numel()  # spconv 2 stores [out, *kernel, in]
                draw = torch.randn(weight.shape, generator=generator)
                weight.copy_(draw * math.sqrt(2.0 / fan_in))
        model.eval()
        try:
            model(features, coords, 1)
        finally:
            for hook in hooks:
                hook.remove()


def _fit(norm: nn.BatchNorm1d, inputs: tuple[Tensor]) -> None:
    """Take mean and variance of the features about to be normalised."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    (x,) = inputs
    mean = x.mean(0)
    variance = x.var(0, unbiased=False)
    # A channel that is constant on this frame (one voxel, or nothing but zeros) keeps a spread
    # comparable to the others, so that it does not blow up on the next frame.
    floor = variance.mean() * 1e-3
    floor = floor if bool(floor > 0) else mean.square().mean().clamp_min(1e-3)
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance.clamp_min(float(floor)))
