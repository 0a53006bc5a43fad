"""Layers whose quantizers are off, as the float layers that they are."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from bevfusion_quant.model import BEVFusion

__all__ = ["plain_layers"]


def plain_layers(model: BEVFusion) -> BEVFusion:
    """The model with each dense layer whose quantizers are all off as torch's own layer.

    Files know torch's layers in float by their class. Parameters are shared, and the model that is
    handed in stays as it is; it is the answer where there is no such layer. Sparse convolutions
    keep their quantizers, off: their files write such layers in half precision.
    """
    from bevquant_quantizers import TensorQuantizer

    found: dict[str, type[nn.Module]] = {}
    for path, module in model.named_modules():
        quantizers = [m for m in module.children() if isinstance(m, TensorQuantizer)]
        if not quantizers or not all(quantizer._disabled for quantizer in quantizers):
            continue
        kind = getattr(module, "float_class", None)
        if kind is not None and issubclass(kind, (nn.modules.conv._ConvNd, nn.Linear)):
            found[path] = kind
    if not found:
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    plain = copy.deepcopy(model, shared)
    for path, kind in found.items():
        layer = plain.get_submodule(path)
        layer.__class__ = kind
        layer._modules.clear()
    return plain
