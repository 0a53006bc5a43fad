"""Constants of a convolution of a file, in floats and in integers."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from bevquant_export.sparse._graph import Conv
from bevquant_int8sim import quantize, quantize_bias

_STEPS = 127


class ConvConstants:
    """Constants of a convolution: floats, and integers computed on first use."""

    def __init__(self, conv: Conv) -> None:
        self.conv = conv

    @cached_property
    def weight(self) -> Tensor:
        """float32, KRSC."""
        return self.conv.weight.float()

    @cached_property
    def bias(self) -> Tensor:
        """float32 ``[out_channels]``."""
        return self.conv.bias.float()

    @cached_property
    def input_scale(self) -> float:
        """Value of one step of the input."""
        return float(self.conv.input_range or 0.0) / _STEPS

    @cached_property
    def weight_scale(self) -> Tensor:
        """float64 ``[out_channels]``."""
        return torch.tensor(self.conv.weight_ranges, dtype=torch.float64) / _STEPS

    @cached_property
    def integer_weight(self) -> Tensor:
        """round(w / s), int8, KRSC."""
        return quantize(self.weight, self.weight_scale, axis=0, name=self.conv.name)

    @cached_property
    def integer_bias(self) -> Tensor:
        """round(b / (s_x · s_w)), int32."""
        scales = self.input_scale, self.weight_scale
        return quantize_bias(self.bias, *scales, name=self.conv.name)
