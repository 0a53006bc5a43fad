"""Layers whose batch norm trains on behind a quantized weight."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from bevquant_graph import layer_class
from bevquant_hybrid.nn.intrinsic import Fused, fused_class, fused_name
from bevquant_hybrid.nn.qat._base import hand_over_qconfig, module_path
from bevquant_hybrid.nn.qat._weighted import ACTIVATION_MODULES, Weighted, anchor_of
from bevquant_hybrid.nn.qat.batchnorm import channel_affine
from bevquant_hybrid.qat_mode import QATMode, get_qat_mode
from bevquant_hybrid.qtensor import QTensor

__all__ = ["WithBatchNorm", "with_batch_norm"]


class WithBatchNorm(Weighted):
    r"""Base of layers with a batch norm between weight and addition.

    With f = γ/√(σ² + ε) of the running statistics: mode ``with_bn`` computes bn(op(x, fq(w)) + b);
    mode ``with_bn_reverse_fold`` computes bn(op(x, fq(f·w)/f) + b), whose evaluation is
    op(x, fq(f·w)) plus a constant: folding it later changes nothing. The mode is that at the time
    the module is made.
    """

    bn: Any
    reverse_fold: bool

    @classmethod
    def from_float(cls, source: nn.Module, qconfig: Any = None) -> Self:
        """Take over a `Fused` layer with a batch norm.

        Raises:
            ValueError: As in `Weighted`; or a transposed convolution with groups, whose weight has
                no axis of output channels.
        """
        fused = source if isinstance(source, Fused) else None
        norm = fused.part("bn") if fused else None
        if fused and cls.channel_axis and getattr(fused.part("conv"), "groups", 1) > 1:
            raise ValueError(
                f"{module_path(source)}: the batch norm behind a transposed convolution with "
                "groups is folded before training only; use set_qat_mode('fuse_bn')"
            )
        self = super().from_float(source, qconfig)
        self.bn = norm
        self.reverse_fold = get_qat_mode() == QATMode.WithBNReverseFold
        # A new one, which starts from the weight that it will see here.
        self.weight_fake_quant = self._weight_fake_quant(self.qconfig)
        self.quantized_weight()
        return self

    def to_float(self) -> nn.Module:
        """Return the `Fused` layer that shares this one's parameters."""
        anchor = self.float_anchor()
        norm = anchor._modules.pop("bn")
        activation = ACTIVATION_MODULES[self.activation]
        make = fused_class(type(anchor), True, self.adds, activation)
        made = make(anchor, norm, activation() if activation else None)
        hand_over_qconfig(anchor, made)
        return made

    def _by_channel(self, factor: Tensor) -> Tensor:
        shape = [1] * self.weight.dim()
        shape[self.channel_axis] = -1
        return factor.reshape(shape)

    def quantized_weight(self) -> QTensor:
        """The weight, or, in reverse-fold mode, the folded weight, fake-quantized."""
        weight = self.weight
        if self.reverse_fold:
            weight = weight * self._by_channel(channel_affine(self.bn)[0])
        quantized: QTensor = self.weight_fake_quant(weight)
        return quantized

    def compute(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Layer and batch norm, and the scale of what the weight amounts to."""
        weight = self.quantized_weight()
        factor, _ = channel_affine(self.bn)
        values = weight.dequantize()
        if self.reverse_fold:
            # A channel with γ = 0 gives its offset whatever its weight is.
            safe = torch.where(factor == 0, torch.ones_like(factor), factor)
            values = values / self._by_channel(safe)
            scale = weight.scale
        else:
            scale = weight.scale * factor.abs()
        return self.bn(self.operate(x, values, self.bias)), scale

    def fixed_weight(self) -> tuple[QTensor, Tensor, Tensor | None]:
        """Integers, their scale per output channel, and the bias, with the batch norm folded in."""
        factor, offset = (value.detach() for value in channel_affine(self.bn))
        bias = offset if self.bias is None else offset + self.bias.detach() * factor
        weight = self.weight.detach()
        if self.reverse_fold:
            folded = self.as_quantized(weight * self._by_channel(factor))
            return folded, folded.scale, bias
        quantized = self.as_quantized(weight)
        signs = self._by_channel(factor.sign()).to(torch.int32)
        integers = (quantized.int_repr().to(torch.int32) * signs).clamp(-128, 127)
        scale = quantized.scale * torch.where(factor == 0, torch.ones_like(factor), factor.abs())
        made = QTensor(integers.to(torch.int8), scale, quantized.dtype, self.channel_axis)
        return made, scale, bias


_made: dict[str, type[WithBatchNorm]] = {}


def with_batch_norm(plain: type[Weighted], source: Fused) -> type[WithBatchNorm]:
    """Return the class of a QAT layer with a batch norm, the same one at every call."""
    activation, anchor = source.part("relu"), anchor_of(source)
    kind = layer_class(activation) if activation is not None else None
    name = fused_name(layer_class(anchor) or type(anchor), True, source.adds, kind)
    if name not in _made:
        doc = f"{plain.__name__} with its batch norm."
        _made[name] = type(name, (WithBatchNorm, plain), {"__doc__": doc})
    return _made[name]
