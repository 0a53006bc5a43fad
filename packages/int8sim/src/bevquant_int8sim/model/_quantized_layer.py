"""Which quantized module becomes which integer layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from bevquant_graph import own_code
from bevquant_int8sim.model._dense_layer import dense_layer
from bevquant_int8sim.model._layer import Layer
from bevquant_int8sim.model._quantizers import integers_of, is_active, unsupported
from bevquant_int8sim.model._sparse_layer import sparse_layer
from bevquant_qnn import QuantSparseConvolution

__all__ = ["quantized_layer"]


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
