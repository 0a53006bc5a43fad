"""Weights without a checkpoint: those that come with the package, and seeded ones that behave."""

from __future__ import annotations

import math
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bev_data import InputError

if TYPE_CHECKING:
    from bevfusion.model._model import Detector


def trained_weights(config: str) -> Path | None:
    """Path of the trained weights for the sizes of a configuration, or None.

    The file's metadata name the command, the training frames and the accuracy on other frames.

    Example:
        >>> trained_weights("nuscenes") is None
        True
    """
    path = Path(__file__).parent / "weights" / f"{config}.safetensors"
    return path if path.is_file() else None


def named_weights(weights: Path | str | None, config: str) -> Path | None:
    """The file that `--weights` means: "trained" the package's own, "random" none, else a path.

    Raises:
        InputError: "trained" for a configuration that the package has no weights for.
    """
    if weights is None or str(weights) == "random":
        return None
    if str(weights) != "trained":
        return Path(weights)
    path = trained_weights(config)
    if path is None:
        raise InputError(
            f"--weights trained: the package has none for config {config!r}; give a file that "
            "`bevfusion-quant train` wrote, or another checkpoint"
        )
    return path


def random_weights(model: Detector, *batch: Any, seed: int = 0) -> Any:
    """Fill `model` in place with random weights whose BatchNorms fit the given batch.

    Convolutions and linear layers are normal with the standard deviation √(2 / fan-in) of He et al.
    2015, attention projections √(1 / fan-in). Norm weights lie in [0.5, 1.5], BatchNorm biases are
    normal around 0.5 with deviation 0.1 (so that most values pass the ReLUs), other biases normal
    around 0 with deviation 0.1. The norms of dense layers, which are up to fifty in a row, are
    milder, [0.75, 1.25] and around 1.5: a random ReLU network enlarges every small difference from
    layer to layer, as a trained one does not, the more so the more of its values the ReLUs cut.
    Running mean and variance are those of the batch, layer after layer, in one forward pass. The
    same parts, seed and batch give the same weights.

    Args:
        model: Changed in place; left in eval mode.
        *batch: The members of a `Batch`; features and coords of one frame are enough for the
            LiDAR branch.
        seed: Any integer.

    Returns:
        The model's output for the batch, from that one pass with the final weights.
    """
    generator = torch.Generator().manual_seed(seed)
    one_frame = len(batch) == 2 and "batch_size" in signature(model.forward).parameters
    inputs = (*batch, 1) if one_frame else batch
    hooks = []
    with torch.no_grad():
        for module in model.modules():
            _fill(module, generator)
            if isinstance(module, _BatchNorm):
                hooks.append(module.register_forward_pre_hook(_fit))
        model.eval()
        try:
            return model(*inputs)
        finally:
            for hook in hooks:
                hook.remove()


def _fill(module: nn.Module, generator: torch.Generator) -> None:
    """Draw the module's own parameters; geometry and parameters of other names stay."""
    own = module._parameters

    def normal(name: str, deviation: float, mean: float = 0.0) -> None:
        parameter = own.get(name)
        if parameter is not None:
            draw = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(draw * deviation + mean)

    if isinstance(module, _BatchNorm | nn.LayerNorm | nn.GroupNorm):
        weight, mild = own.get("weight"), isinstance(module, nn.BatchNorm2d)
        if weight is not None:
            spread = 0.5 if mild else 1.0
            weight.copy_(1 + (torch.rand(weight.shape, generator=generator) - 0.5) * spread)
        normal("bias", 0.1, 1.5 if mild else 0.5 if isinstance(module, _BatchNorm) else 0.0)
    elif isinstance(module, nn.MultiheadAttention):
        normal("in_proj_weight", 1 / math.sqrt(module.embed_dim))
        normal("in_proj_bias", 0.1)
    elif isinstance(weight := own.get("weight"), Tensor):
        normal("weight", math.sqrt(2.0 / _fan_in(module, weight)))
        normal("bias", 0.1)


def _fan_in(module: nn.Module, weight: Tensor) -> float:
    """Number of inputs that one output sums."""
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        # [in, out / groups, *kernel]: of the kernel, an output sees one tap in each stride.
        return weight[:, 0].numel() / (math.prod(module.stride) * module.groups)
    return weight[0].numel()  # dense [out, in, *kernel], and spconv 2 stores [out, *kernel, in]


def _fit(norm: Any, inputs: tuple[Tensor]) -> None:
    """Take mean and variance of the values about to be normalised."""
    (x,) = inputs
    mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    # A channel that is constant on this batch (one voxel, or nothing but zeros) keeps a spread
    # comparable to the others, so that it does not blow up on the next one.
    floor = variance.mean() * 1e-3
    floor = floor if bool(floor > 0) else mean.square().mean().clamp_min(1e-3)
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance.clamp_min(float(floor)))
