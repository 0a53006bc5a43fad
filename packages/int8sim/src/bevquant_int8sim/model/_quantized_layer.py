"""Which quantized module becomes which integer layer, and what the others run as."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from bevquant_graph import layer_class, own_code
from bevquant_int8sim.model._dense_layer import dense_layer
from bevquant_int8sim.model._float_sparse import FloatSparseConv
from bevquant_int8sim.model._layer import Layer
from bevquant_int8sim.model._quantizers import integers_of, is_active, unsupported
from bevquant_int8sim.model._sparse_layer import geometry_of, sparse_activation, sparse_layer
from bevquant_qnn import QuantSparseConvolution
from bevquant_sparse import WeightLayout, get_weight, is_sparse_conv, permute_weight

__all__ = ["float_sparse_step", "quantized_layer"]


def quantized_layer(module: nn.Module, path: str) -> Layer | str:
    """The integer layer of a quantized module, or the reason why it stays float.

    Raises:
        ValueError: A range or a bias is unusable; the layer is named.
    """
    quantizer: Any = module._modules["_input_quantizer"]
    if not is_active(quantizer):
        return "its input quantizer is off"
    reason = unsupported(quantizer)
    if reason:
        return reason
    integers = integers_of(quantizer, path)
    if isinstance(module, QuantSparseConvolution):
        own = own_code(module, QuantSparseConvolution)
        return own or sparse_layer(module, integers, path)
    return dense_layer(module, integers, path)


def float_sparse_step(module: Any) -> FloatSparseConv | None:
    """A sparse convolution that runs in float on sites; ``None`` for other modules."""
    if layer_class(module, QuantSparseConvolution):
        own = module.weight_layout
        weight: Tensor = module.quantized_weight().detach()
        quantizer = module._input_quantizer if is_active(module._input_quantizer) else None
    elif is_sparse_conv(module) and own_code(module) is None:
        own, quantizer = WeightLayout.VCK, None
        weight = get_weight(module, WeightLayout.VCK).detach()
    else:
        return None
    geometry = geometry_of(module)
    if own is not WeightLayout.VCK:
        weight = permute_weight(weight, own, WeightLayout.VCK, kernel_size=geometry.kernel_size)
    key = getattr(module, "indice_key", None)
    return FloatSparseConv(
        weight.clone(),
        None if module.bias is None else module.bias.detach().clone(),
        geometry,
        None if key is None else str(key),
        sparse_activation(module),
        float(getattr(module, "act_alpha", 0.0)),
        quantizer,
    )
