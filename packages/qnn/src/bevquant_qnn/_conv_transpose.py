"""Quantized transposed convolutions; a weight is [in, out/groups, *kernel]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_qnn._descriptors import Axis
from bevquant_qnn._weighted import QuantWeighted

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

    Args:
        *args: As `torch.nn.ConvTranspose2d`.
        quant_desc_input: Descriptor of the input quantizer.
        quant_desc_weight: Descriptor of the weight quantizer.
        **kwargs: As `torch.nn.ConvTranspose2d`.

    Example:
        >>> QuantConvTranspose2d(4, 8, 2).weight_quantizer.axis
        1
    """

    float_class = nn.ConvTranspose2d


class QuantConvTranspose3d(_QuantConvTransposeNd, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d`, quantized as `QuantConvTranspose1d`.

    Args:
        *args: As `torch.nn.ConvTranspose3d`.
        quant_desc_input: Descriptor of the input quantizer.
        quant_desc_weight: Descriptor of the weight quantizer.
        **kwargs: As `torch.nn.ConvTranspose3d`.

    Example:
        >>> QuantConvTranspose3d(4, 8, 2, groups=2).weight_quantizer.axis
        (0, 2)
    """

    float_class = nn.ConvTranspose3d
