"""Find the quantizers that have no range to quantize with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ._tensor_quantizer import TensorQuantizer

__all__ = ["uncalibrated"]


def uncalibrated(model: nn.Module) -> list[str]:
    """List the quantizers that would quantize, but have no usable range.

    Such a range is missing (dynamic), NaN, infinite, negative, or 0 for the whole tensor. A zero
    for some channels of a weight is usable: those channels are zero.

    Args:
        model: Any module; a quantizer used in several places is listed once, at the first.

    Returns:
        Their paths in the order of `model.named_modules()`. Disabled quantizers are left out.

    Examples:
        >>> from torch import nn
        >>> from bevquant_quantizers import TensorQuantizer
        >>> uncalibrated(nn.Sequential(TensorQuantizer(), TensorQuantizer(disabled=True)))
        ['0']
    """
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, TensorQuantizer) and not module._disabled and module._if_quant
        if not _usable(_range_of(module))
    ]


def _range_of(quantizer: TensorQuantizer) -> Tensor | None:
    if quantizer._learn_amax:
        return torch.maximum(-quantizer.clip.clip_value_min, quantizer.clip.clip_value_max)
    return quantizer.amax


def _usable(amax: Tensor | None) -> bool:
    if amax is None:
        return False
    return bool(amax.isfinite().all() and (amax >= 0).all() and (amax > 0).any())
