"""Quantized convolutions: y = conv(fq(x), fq(w)) + b, per output channel weight ranges."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from bevquant_qnn._weighted import QuantWeighted


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

    The arithmetic is `QuantConv1d`'s.

    Args:
        *args: As `torch.nn.Conv2d`.
        quant_desc_input: Descriptor of the input quantizer.
        quant_desc_weight: Descriptor of the weight quantizer.
        **kwargs: As `torch.nn.Conv2d`.

    Example:
        >>> import torch
        >>> QuantConv2d(2, 3, 3, padding=1, padding_mode="reflect")(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 3, 8, 8])
    """

    float_class = nn.Conv2d


class QuantConv3d(_QuantConvNd, nn.Conv3d):
    """`torch.nn.Conv3d` on a fake-quantized input [N, C, D, H, W] and weight.

    The arithmetic is `QuantConv1d`'s.

    Args:
        *args: As `torch.nn.Conv3d`.
        quant_desc_input: Descriptor of the input quantizer.
        quant_desc_weight: Descriptor of the weight quantizer.
        **kwargs: As `torch.nn.Conv3d`.

    Example:
        >>> import torch
        >>> QuantConv3d(2, 3, 3)(torch.ones(1, 2, 4, 4, 4)).shape
        torch.Size([1, 3, 2, 2, 2])
    """

    float_class = nn.Conv3d
