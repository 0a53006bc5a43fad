"""Quantized pooling: the float pooling of a fake-quantized input."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from bevquant_graph import layer_class
from bevquant_qnn._descriptors import InputDefault
from bevquant_qnn._takeover import attach_quantizer, no_source, take_over
from bevquant_quantizers import QuantDescriptor, TensorQuantizer


class QuantPool(InputDefault, nn.Module):
    """Mixin: `_input_quantizer` and `from_float` for a pooling class named by `float_class`.

    Args:
        *args: As that class of torch.
        quant_desc_input: Descriptor of the input quantizer.
        **kwargs: As that class of torch.

    Example:
        >>> import torch
        >>> QuantMaxPool1d(2)(torch.ones(1, 3, 8)).shape
        torch.Size([1, 3, 4])
        >>> QuantAdaptiveAvgPool3d(4)(torch.ones(1, 3, 8, 8, 8)).shape
        torch.Size([1, 3, 4, 4, 4])
    """

    float_class: type[nn.Module]

    def __init__(
        self, *args: Any, quant_desc_input: QuantDescriptor | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._add_quantizer(quant_desc_input)

    @classmethod
    def from_float(
        cls, module: nn.Module, *, quant_desc_input: QuantDescriptor | None = None
    ) -> Self:
        """Return the quantized form of a float pooling module, with its hooks and training flag."""
        if layer_class(module, cls.float_class) is None:
            raise no_source(cls, module)
        quantized = take_over(cls.__new__(cls), module)
        quantized._add_quantizer(quant_desc_input)
        return quantized

    def _add_quantizer(self, quant_desc_input: QuantDescriptor | None) -> None:
        descriptor = self._input_descriptor(quant_desc_input)
        attach_quantizer(self, "_input_quantizer", TensorQuantizer(descriptor))

    def forward(self, input: Tensor) -> Any:
        """Pool the fake-quantized input."""
        # Only ever mixed in in front of a torch pooling class, whose forward this is.
        pool: Any = super().forward
        return pool(self._input_quantizer(input))


class QuantMaxPool1d(QuantPool, nn.MaxPool1d):
    """`torch.nn.MaxPool1d`: the maximum over fake-quantized values [N, C, L]."""

    float_class = nn.MaxPool1d


class QuantAvgPool1d(QuantPool, nn.AvgPool1d):
    """`torch.nn.AvgPool1d`: the mean over fake-quantized values [N, C, L]."""

    float_class = nn.AvgPool1d


class QuantAdaptiveAvgPool1d(QuantPool, nn.AdaptiveAvgPool1d):
    """`torch.nn.AdaptiveAvgPool1d`: the adaptive mean over fake-quantized values [N, C, L]."""

    float_class = nn.AdaptiveAvgPool1d


class QuantMaxPool2d(QuantPool, nn.MaxPool2d):
    """`torch.nn.MaxPool2d`: the maximum over fake-quantized values [N, C, H, W]."""

    float_class = nn.MaxPool2d


class QuantAvgPool2d(QuantPool, nn.AvgPool2d):
    """`torch.nn.AvgPool2d`: the mean over fake-quantized values [N, C, H, W]."""

    float_class = nn.AvgPool2d


class QuantAdaptiveAvgPool2d(QuantPool, nn.AdaptiveAvgPool2d):
    """`torch.nn.AdaptiveAvgPool2d`: the adaptive mean over fake-quantized values [N, C, H, W]."""

    float_class = nn.AdaptiveAvgPool2d


class QuantMaxPool3d(QuantPool, nn.MaxPool3d):
    """`torch.nn.MaxPool3d`: the maximum over fake-quantized values [N, C, D, H, W]."""

    float_class = nn.MaxPool3d


class QuantAvgPool3d(QuantPool, nn.AvgPool3d):
    """`torch.nn.AvgPool3d`: the mean over fake-quantized values [N, C, D, H, W]."""

    float_class = nn.AvgPool3d


class QuantAdaptiveAvgPool3d(QuantPool, nn.AdaptiveAvgPool3d):
    """`torch.nn.AdaptiveAvgPool3d`: the adaptive mean over fake-quantized [N, C, D, H, W]."""

    float_class = nn.AdaptiveAvgPool3d
