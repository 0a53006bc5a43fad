"""The weights of an operator, in whatever form a model holds them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize
from bevquant_hybrid.nn.qat._weighted import Weighted
from bevquant_hybrid.nn.qat._with_bn import WithBatchNorm
from bevquant_hybrid.nn.quantized._base import FixedPoint
from bevquant_hybrid.qtensor import QTensor

__all__ = ["fixed_weight", "parameters_of"]

_FIXED = ("weight", "bias", "factor", "offset")


def parameters_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values: of QAT layers the quantized weight, of fixed-point ones the integers."""
    if isinstance(module, FixedPoint):
        for name in _FIXED:
            value = getattr(module, name, None)
            if isinstance(value, Tensor):
                yield name, _fixed(module, name)
        return
    for name, value in module.named_parameters():
        if "fake_quant" in name or "activation_post_process" in name:
            continue
        made = value.detach()
        if name == "weight" and isinstance(module, Weighted) and _is_quantized(module):
            made = module.as_quantized(made)
        yield name, made


def _is_quantized(module: Weighted) -> bool:
    """Whether the weight itself, and not what a batch norm makes of it, has the scale."""
    fake_quant = module.weight_fake_quant
    return isinstance(fake_quant, FakeQuantize) and not isinstance(module, WithBatchNorm)


def fixed_weight(module: nn.Module) -> Tensor:
    """A fixed-point layer's weight, with its scale."""
    return _fixed(module, "weight")


def _fixed(module: nn.Module, name: str) -> Tensor:
    values: Tensor = getattr(module, name).detach()
    scale: Tensor | None = getattr(module, f"{name}_scale", None)
    if scale is None:
        return values
    if scale.numel() == 1:
        return QTensor(values, scale, "qint8")
    axis = 1 if getattr(module, "transposed", False) else 0
    # The groups of a transposed convolution share the scales of axis 1.
    return QTensor(values, scale[: values.shape[axis]], "qint8", axis)
