"""Quantized layers with a weight: convolutions, transposed ones, linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_graph import layer_class
from bevquant_qnn._bias_ranges import FitsBias
from bevquant_qnn._descriptors import Axis, WeightDefault
from bevquant_qnn._input_channels import InputChannels
from bevquant_qnn._takeover import no_source, take_over
from bevquant_quantizers import QuantDescriptor

# Common parts of dense quantized modules with a weight: two quantizers and `from_float`.


class QuantWeighted(WeightDefault, FitsBias, InputChannels, nn.Module):
    """Mixin: `_input_quantizer`, `_weight_quantizer` and `from_float`.

    A class that uses it is also a subclass of its float torch class, named by `float_class`.

    Args:
        *args: As that class of torch.
        quant_desc_input: Descriptor of the input quantizer.
        quant_desc_weight: Descriptor of the weight quantizer.
        **kwargs: As that class of torch.
    """

    float_class: type[nn.Module]
    weight: Tensor

    def __init__(
        self,
        *args: Any,
        quant_desc_input: QuantDescriptor | None = None,
        quant_desc_weight: QuantDescriptor | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._add_quantizers(quant_desc_input, quant_desc_weight)

    @classmethod
    def from_float(
        cls,
        module: nn.Module,
        *,
        quant_desc_input: QuantDescriptor | None = None,
        quant_desc_weight: QuantDescriptor | None = None,
    ) -> Self:
        """Return the quantized form of a float module, holding the float module's own parameters.

        Args:
            module: An instance of `float_class`. Its parameters, buffers, hooks, device, dtype
                and training flag are taken over; the parameters stay the same objects.
            quant_desc_input: Descriptor of the input quantizer; 8 bit per tensor by default.
            quant_desc_weight: Descriptor of the weight quantizer; 8 bit per output channel by
                default.
        """
        if layer_class(module, cls.float_class) is None:
            raise no_source(cls, module)
        quantized = take_over(cls.__new__(cls), module)
        axes = len(getattr(module, "kernel_size", ()))
        for name in ("stride", "padding", "dilation", "output_padding"):
            given = vars(quantized).get(name)
            if isinstance(given, tuple) and len(given) == 1:  # of `stride=[2]`, for every axis
                setattr(quantized, name, given * axes)
        quantized._add_quantizers(quant_desc_input, quant_desc_weight)
        return quantized

    def weight_to_quantize(self) -> Tensor:
        """Return the weight in the shape in which its quantizer's axes number output channels.

        Divided by the factors of the input's channels, where these have ranges of their own.
        """
        factors = self.weight_factors()
        return self.weight if factors is None else self.weight / factors

    def quantized_weight(self) -> Tensor:
        """Return the fake-quantized weight that the forward multiplies by."""
        result: Tensor = self._weight_quantizer(self.weight_to_quantize())
        return result.reshape(self.weight.shape)

    def channels_of(self, input: Tensor) -> Tensor:
        """Return an input as [rows, channels, places]."""
        after = self._axes_after()
        if not after:
            return input.reshape(-1, input.shape[-1], 1)
        return (input if input.dim() == after + 2 else input[None]).flatten(2)

    def weight_by_channel(self) -> Tensor:
        """Return the weight as [groups, out/groups, in/groups, kernel], not divided by f."""
        groups = getattr(self, "groups", 1)
        outputs, inputs = self.weight.shape[:2]
        return self.weight.reshape(groups, outputs // groups, inputs, -1)

    def _axes_after(self) -> int:
        return self.weight.dim() - 2

    def _by_weight(self, factors: Tensor) -> Tensor:
        groups, shape = getattr(self, "groups", 1), self.weight.shape
        each = factors.reshape(groups, 1, shape[1]).expand(-1, shape[0] // groups, -1)
        return each.reshape(shape[0], shape[1], *[1] * self._axes_after())


class _QuantConvNd(QuantWeighted):
    def forward(self, input: Tensor) -> Tensor:
        """Convolve the fake-quantized input with the fake-quantized weight; the bias is float."""
        # torch's own _conv_forward pads by padding_mode, which upstream leaves out for
        # "reflect" and "replicate".
        convolve: Any = self._conv_forward
        result: Tensor = convolve(self.quantized_input(input), self.quantized_weight(), self.bias)
        return result


class QuantConv1d(_QuantConvNd, nn.Conv1d):
    """`torch.nn.Conv1d` on a fake-quantized input [N, C, L] and weight [out, in/groups, k].

    y = conv(fq(x), fq(w)) + b, with fq(v) = clamp(round(v·127/amax), −128, 127)·amax/127 (round
    half to even; −127 below with `narrow_range`), one amax for x and one per output channel for w.

    Args:
        *args: As `torch.nn.Conv1d`.
        quant_desc_input: Descriptor of the input quantizer.
        quant_desc_weight: Descriptor of the weight quantizer.
        **kwargs: As `torch.nn.Conv1d`.

    Example:
        >>> import torch
        >>> QuantConv1d(2, 3, 3)(torch.ones(1, 2, 8)).shape
        torch.Size([1, 3, 6])
    """

    float_class = nn.Conv1d


class QuantConv2d(_QuantConvNd, nn.Conv2d):
    """`torch.nn.Conv2d` on a fake-quantized input [N, C, H, W] and weight [out, in/groups, k, k].

    Arithmetic and arguments are `QuantConv1d`'s.

    Example:
        >>> import torch
        >>> QuantConv2d(2, 3, 3, padding=1, padding_mode="reflect")(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 3, 8, 8])
    """

    float_class = nn.Conv2d


class QuantConv3d(_QuantConvNd, nn.Conv3d):
    """`torch.nn.Conv3d` on a fake-quantized input [N, C, D, H, W] and weight.

    Arithmetic and arguments are `QuantConv1d`'s.

    Example:
        >>> import torch
        >>> QuantConv3d(2, 3, 3)(torch.ones(1, 2, 4, 4, 4)).shape
        torch.Size([1, 3, 2, 2, 2])
    """

    float_class = nn.Conv3d


# Quantized fully connected layer.


class QuantLinear(QuantWeighted, nn.Linear):
    """`torch.nn.Linear` on a fake-quantized input [..., in] and weight [out, in].

    y = fq(x)·fq(w)ᵀ + b, one range for x and one per row (output) of w.

    Args:
        *args: As `torch.nn.Linear`.
        quant_desc_input: Descriptor of the input quantizer.
        quant_desc_weight: Descriptor of the weight quantizer.
        **kwargs: As `torch.nn.Linear`.

    Example:
        >>> import torch
        >>> QuantLinear(4, 2)(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    float_class = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        """Multiply the fake-quantized input by the fake-quantized weight; the bias is float."""
        return F.linear(self.quantized_input(input), self.quantized_weight(), self.bias)


# Quantized transposed convolutions; a weight is [in, out/groups, *kernel].

_FUNCTIONS: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


class _QuantConvTransposeNd(QuantWeighted):
    groups: int

    @classmethod
    def weight_axis(cls, module: nn.Module) -> Axis:
        """Axis 1; with groups, axes 0 and 2 of [groups, in/groups, out/groups, *kernel]."""
        return 1 if module.groups == 1 else (0, 2)

    def weight_to_quantize(self) -> Tensor:
        """Return the weight, with groups as [groups, in/groups, out/groups, *kernel]."""
        # Output channel j of group g is weight[g·in/groups : (g+1)·in/groups, j]: an axis of the
        # stored tensor holds it only after the groups are split off.
        weight = super().weight_to_quantize()
        if self.groups == 1 or not self._grouped_ranges():
            return weight
        return weight.reshape(self.groups, -1, *weight.shape[1:])

    def weight_by_channel(self) -> Tensor:
        """Return the weight as [groups, out/groups, in/groups, kernel], not divided by f."""
        return self.weight.reshape(
            self.groups, -1, self.weight.shape[1], self.weight[0, 0].numel()
        ).transpose(1, 2)

    def _by_weight(self, factors: Tensor) -> Tensor:
        return factors.reshape(-1, *[1] * (self.weight.dim() - 1))

    def _grouped_ranges(self) -> bool:
        """False for ranges of the stored shape, such as those of an upstream checkpoint."""
        amax = self._weight_quantizer.amax
        if isinstance(amax, Tensor) and amax.numel() > 1:
            return amax.dim() == self.weight.dim() + 1
        return self._weight_quantizer.axis == (0, 2)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Apply the transposed convolution to fake-quantized operands; the bias is float."""
        if self.padding_mode != "zeros":
            msg = (
                f"{type(self).__name__}: padding_mode {self.padding_mode!r} does not exist for "
                "transposed convolutions; use 'zeros'."
            )
            raise ValueError(msg)
        rank = self.weight.dim() - 2
        find_padding: Any = self._output_padding
        output_padding = find_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, rank, self.dilation
        )
        # Of an output_size that follows the input: a number, and in a graph a guard on the size.
        output_padding = tuple(map(int, output_padding))
        return _FUNCTIONS[rank](
            self.quantized_input(input),
            self.quantized_weight(),
            self.bias,
            self.stride,
            self.padding,
            output_padding,
            self.groups,
            self.dilation,
        )


class QuantConvTranspose1d(_QuantConvTransposeNd, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` on a fake-quantized input and weight [in, out/groups, k].

    The weight has one range per output channel: axis 1, or with groups axes (0, 2) of the weight
    seen as [groups, in/groups, out/groups, *kernel]. Upstream's default is axis 0, the input
    channels; a range of that shape in a checkpoint is used as it stands.

    Args:
        *args: As `torch.nn.ConvTranspose1d`.
        quant_desc_input: Descriptor of the input quantizer.
        quant_desc_weight: Descriptor of the weight quantizer.
        **kwargs: As `torch.nn.ConvTranspose1d`.

    Example:
        >>> import torch
        >>> QuantConvTranspose1d(2, 4, 2, stride=2, groups=2)(torch.ones(1, 2, 8)).shape
        torch.Size([1, 4, 16])
    """

    float_class = nn.ConvTranspose1d


class QuantConvTranspose2d(_QuantConvTransposeNd, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d`, quantized as `QuantConvTranspose1d`.

    Example:
        >>> QuantConvTranspose2d(4, 8, 2).weight_quantizer.axis
        1
    """

    float_class = nn.ConvTranspose2d


class QuantConvTranspose3d(_QuantConvTransposeNd, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d`, quantized as `QuantConvTranspose1d`.

    Example:
        >>> QuantConvTranspose3d(4, 8, 2, groups=2).weight_quantizer.axis
        (0, 2)
    """

    float_class = nn.ConvTranspose3d
