"""Layers with a weight: quantize it, compute, normalize, add, activate, quantize."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize
from bevquant_hybrid.nn.intrinsic import ANCHORS, Fused, anchor_of, fused_class, fused_name
from bevquant_hybrid.nn.qat._base import (
    activation_of,
    derived,
    float_layer,
    give_back,
    hand_over_qconfig,
    module_path,
    quantized_input,
    quantized_output,
    remember_qconfig,
    take_over,
)
from bevquant_hybrid.nn.qat.batchnorm import channel_affine
from bevquant_hybrid.qat_mode import QATMode, get_qat_mode
from bevquant_hybrid.qtensor import QTensor

ACTIVATION_MODULES: dict[str | None, type[nn.Module] | None] = {
    None: None,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
}
_ACTIVATIONS = {None: lambda x: x, "relu": F.relu, "relu6": F.relu6}


class Weighted(nn.Module):
    r"""Base of QAT convolutions and linear layers.

    :math:`y = \operatorname{fq}(a(\operatorname{op}(x, \operatorname{fq}(w)) + b [+ z]))` with
    activation a. Without an output fake quantizer the result has the accumulator's scale s_x·s_w
    and 32 bits.
    """

    adds: ClassVar[bool] = False  # whether a second input is added
    activation: ClassVar[str | None] = None  # None, "relu" or "relu6"
    channel_axis: ClassVar[int] = 0  # axis of the output channels in the weight
    output_channel_axis: ClassVar[int] = 1

    weight: Tensor
    bias: Tensor | None
    weight_fake_quant: Any
    activation_post_process: Any

    @classmethod
    def anchor(cls) -> type[nn.Module]:
        """The float layer's class."""
        return next(base for base in cls.__mro__ if base in ANCHORS)

    @classmethod
    def from_float(cls, source: nn.Module, qconfig: Any = None) -> Self:
        """Take over a float layer or a `Fused` one; parameters are shared.

        Raises:
            ValueError: No qconfig, one without a weight, or a padding mode that a BPU does not
                execute.
        """
        qconfig = qconfig or getattr(source, "qconfig", None)
        anchor: nn.Module = float_layer(anchor_of(source))
        if qconfig is None or qconfig.weight is None:
            raise ValueError(
                f"{module_path(source)} ({type(source).__name__}): a layer on the BPU needs a "
                "qconfig with a weight; set one for it, or run the layer on the CPU"
            )
        if getattr(anchor, "padding_mode", "zeros") != "zeros":
            raise ValueError(
                f"{module_path(source)} ({type(source).__name__}): padding_mode="
                f"{anchor.padding_mode!r}: a BPU pads with zeros; pad with a module before it"
            )
        self = take_over(cls, anchor)
        remember_qconfig(self, source, qconfig)
        self.weight_fake_quant = self._weight_fake_quant(qconfig)
        self.register_module("activation_post_process", activation_of(qconfig))
        if isinstance(self.weight_fake_quant, FakeQuantize):
            self.weight_fake_quant.observe(self.weight)
        return self

    def _weight_fake_quant(self, qconfig: Any) -> Any:
        made = qconfig.weight()
        # A qconfig counts channels on axis 0; a transposed convolution has its outputs' on axis 1.
        if self.channel_axis and getattr(made, "ch_axis", -1) >= 0:
            return qconfig.weight(ch_axis=self.channel_axis)
        return made

    def to_float(self) -> nn.Module:
        """Return the float layer, or the `Fused` one, that shares this one's parameters."""
        base = self.anchor()
        anchor: nn.Module = give_back(base, self)
        norm = anchor._modules.pop("bn", None)
        activation = ACTIVATION_MODULES[self.activation]
        if not self.adds and activation is None and norm is None:
            return anchor
        fused = fused_class(base, norm is not None, self.adds, activation)
        made = fused(anchor, norm, activation() if activation else None)
        hand_over_qconfig(anchor, made)
        return made

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the layer itself."""
        raise NotImplementedError

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Compute; `other` is the addend of a fused addition.

        Raises:
            TypeError: An input is not quantized.
        """
        y, weight_scale = self.compute(quantized_input(self, x))
        if other is not None:
            y = y + quantized_input(self, other, "second input")
        y = _ACTIVATIONS[self.activation](y)
        if self.activation_post_process is not None or not isinstance(x, QTensor):
            return quantized_output(self, y)
        # Without a scale of its own the result is what accumulators hold, a scale per channel.
        scale = (x.scale * weight_scale).detach()
        axis = self.output_channel_axis % y.dim() if scale.numel() > 1 else -1
        return QTensor(y, scale, "qint32", axis, lenient=x.lenient, on_grid=False)

    def compute(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's result with a quantized weight, and the weight's scale per output channel."""
        weight = self.weight_fake_quant(self.weight)
        y = self.operate(x, weight.dequantize(), self.bias)
        return y, self.scale_of_channels(weight.scale)

    def as_quantized(self, weight: Tensor) -> QTensor:
        """A weight on the last observed grid, without observing."""
        fake_quant = self.weight_fake_quant
        values = fake_quant.fake_quantize(weight)
        return QTensor(values, fake_quant.current_scale(), fake_quant.dtype, fake_quant.ch_axis)

    def fixed_weight(self) -> tuple[QTensor, Tensor, Tensor | None]:
        """The integers for convert, their scale per output channel, and the bias."""
        quantized = self.as_quantized(self.weight.detach())
        bias = None if self.bias is None else self.bias.detach()
        return quantized, self.scale_of_channels(quantized.scale), bias

    def scale_of_channels(self, scale: Tensor) -> Tensor:
        """The weight's scales per output channel."""
        return scale

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """Compute with an addition: the call that it replaces was ``.add(x, other)``."""
        result: Tensor = self(x, other)
        return result


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
        """The result of layer and batch norm, and the effective weight's scale."""
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
        # Scales are positive: a channel with a negative factor has its integers negated, where
        # −(−128) is one step too many.
        signs = self._by_channel(factor.sign()).to(torch.int32)
        integers = (quantized.int_repr().to(torch.int32) * signs).clamp(-128, 127)
        scale = quantized.scale * torch.where(factor == 0, torch.ones_like(factor), factor.abs())
        made = QTensor(integers.to(torch.int8), scale, quantized.dtype, self.channel_axis)
        return made, scale, bias


@functools.cache
def with_batch_norm(plain: Any) -> type[WithBatchNorm]:
    """The class of a QAT layer with a batch norm."""
    name = fused_name(plain.anchor(), True, plain.adds, ACTIVATION_MODULES[plain.activation])
    doc = f"{plain.__name__} with its batch norm."
    return type(name, (WithBatchNorm, plain), {"__doc__": doc})


def fused_forms(base: Any) -> list[Any]:
    """The classes of a layer with ReLU, ReLU6, an addition, and that with ReLU and ReLU6."""
    made: list[Any] = []
    for adds in (False, True):
        for activation, kind in ACTIVATION_MODULES.items():
            if adds or activation:
                # With an addition and an activation, a class is one of those with the addition.
                name = fused_name(base.anchor(), False, adds, kind)
                about = {"adds": adds, "activation": activation, "__module__": base.__module__}
                about["__doc__"] = f"`{base.__name__}` with what follows it."
                made.append(type(name, (made[2] if adds and activation else base,), about))
    return made


class Convolution(Weighted):
    """Convolution with a quantized weight and output."""

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve."""
        layer: Any = self
        result: Tensor = layer._conv_forward(x, weight, bias)
        return result


class ConvTranspose2d(Weighted, nn.ConvTranspose2d):  # type: ignore[misc]
    """Transposed convolution with a quantized weight (a scale per axis 1) and output."""

    channel_axis = 1

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve."""
        padding: Any = self.padding
        sizes = self.stride, padding, self.output_padding, self.groups, self.dilation
        return F.conv_transpose2d(x, weight, bias, *sizes)

    def scale_of_channels(self, scale: Tensor) -> Tensor:
        """Groups share the scales of axis 1."""
        return scale if scale.numel() == 1 else torch.cat([scale] * self.groups)


class Linear(Weighted, nn.Linear):  # type: ignore[misc]
    """Fully connected layer with a quantized weight and output."""

    output_channel_axis = -1

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply."""
        return F.linear(x, weight, bias)


Conv3d = derived(Convolution, nn.Conv3d, __name__)
ConvReLU3d, ConvReLU63d, ConvAdd3d, ConvAddReLU3d, ConvAddReLU63d = fused_forms(Conv3d)
(
    ConvTransposeReLU2d, ConvTransposeReLU62d, ConvTransposeAdd2d, ConvTransposeAddReLU2d,
    ConvTransposeAddReLU62d,
) = fused_forms(ConvTranspose2d)  # fmt: skip
LinearReLU, LinearReLU6, LinearAdd, LinearAddReLU, LinearAddReLU6 = fused_forms(Linear)
