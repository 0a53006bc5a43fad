"""Quantized layers: the range of a weight is folded with the weight.

A quantized layer has its weight's quantizer as the child ``_weight_quantizer``, as in
pytorch-quantization. That quantizer changes its range by ``scale_range(factor, weight)``. Nothing
else is known of quantization here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_sparse import WeightLayout, get_weight, is_sparse_conv, layout_of, set_weight

_INPUT, _WEIGHT = "_input_quantizer", "_weight_quantizer"


def is_sparse(module: object) -> bool:
    """Whether a module is a sparse convolution, or one that took over the weight of one."""
    return is_sparse_conv(module) or isinstance(
        getattr(module, "weight_layout", None), WeightLayout
    )


def children_problem(layer: nn.Module) -> str | None:
    """Why the children of a layer forbid folding a batch norm into it; None if they do not.

    An unknown child may quantize the weight, or the layer's output.
    """
    name = type(layer).__name__
    children = {key: child for key, child in layer._modules.items() if child is not None}
    quantizer = children.pop(_WEIGHT, None)
    if quantizer is not None:
        if not hasattr(quantizer, "scale_range"):
            return (
                f"{name} quantizes its weight by a {type(quantizer).__name__} "
                f"({type(quantizer).__module__}), whose range cannot be folded; fold first, or "
                "make it bevquant's (bevquant_quantizers.adopt_quantizers)"
            )
        children.pop(_INPUT, None)
        if "weight" not in layer._parameters:
            return f"{name} quantizes a weight that another module holds; fold before quantizing"
    for key, child in children.items():
        if key != "parametrizations":
            return (
                f"{name} has a module of its own, {key} ({type(child).__name__}), which probably "
                "changes its weight or its output, as a quantizer does; fold before it is added"
            )
    return None


def other_readers(model: nn.Module, layer: nn.Module) -> list[str]:
    """Paths of other layers whose weights go through the same quantizer."""
    quantizer = layer._modules.get(_WEIGHT)
    return [
        path
        for path, module in model.named_modules()
        if quantizer is not None
        and module is not layer
        and module._modules.get(_WEIGHT) is quantizer
    ]


def scale_ranges(layer: nn.Module, scale: Tensor) -> None:
    """Multiply the weight's range by |s| of its output channels, in place."""
    quantizer: Any = layer._modules.get(_WEIGHT)
    if quantizer is None:
        return
    module: Any = layer
    # Where the input channels have ranges of their own, the weight divided by f is quantized.
    factors = module.weight_factors() if hasattr(layer, "weight_factors") else None
    factors = torch.ones((), device=scale.device) if factors is None else factors
    if is_sparse(layer):
        layout = layout_of(layer)
        weight = get_weight(layer, layout) / factors
        shape = [1] * weight.dim()
        shape[layout.out_axis] = -1
        kept = quantizer.scale_range(scale.reshape(shape), weight)
        # Weights above the range were clamped to it where s is negative, which changes no integer.
        if kept is not weight:
            set_weight(layer, kept * factors, layout)
        return
    weight = module.weight / factors
    spatial = [1] * (weight.dim() - 2)
    if not getattr(module, "transposed", False):
        kept = quantizer.scale_range(scale.reshape(-1, 1, *spatial), weight)
    else:
        # The axes of ranges may be those of [groups, in/groups, out/groups, *kernel].
        grouped = weight.reshape(module.groups, -1, *weight.shape[1:])
        factor = scale.reshape(module.groups, 1, -1, *spatial)
        if not _has_groups(quantizer, weight):
            factor = factor.expand(*grouped.shape[:3], *spatial).flatten(0, 1)
            grouped = weight
        kept = quantizer.scale_range(factor, grouped).reshape(weight.shape)
    if not torch.equal(kept, weight):
        module.weight = nn.Parameter((kept * factors).detach(), module.weight.requires_grad)


def _has_groups(quantizer: Any, weight: Tensor) -> bool:
    """Whether a transposed convolution's ranges run over its groups too."""
    amax = quantizer.amax
    if isinstance(amax, Tensor) and amax.numel() > 1:
        return amax.dim() > weight.dim()
    axis = quantizer.axis
    return not isinstance(axis, int) and axis is not None and len(axis) == 2


@contextmanager
def unchanged_on_error(layer: nn.Module) -> Iterator[None]:
    """Give a layer back its weight, bias and range of the weight if the block raises."""
    module: Any = layer
    weight, bias = module.weight, module.bias
    quantizer = layer._modules.get(_WEIGHT)
    # The range is a buffer, or a parameter where it is learned.
    held = [] if quantizer is None else [*quantizer.parameters(), *quantizer.buffers()]
    kept = [tensor.detach().clone() for tensor in held]
    try:
        yield
    except ValueError:
        module.weight, module.bias = weight, bias
        for tensor, value in zip(held, kept, strict=True):
            tensor.data.copy_(value)
        raise
