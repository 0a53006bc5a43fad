"""QAT 2-D convolutions, alone and with fused operators."""

from __future__ import annotations

from torch import nn

from bevquant_hybrid.nn.qat._base import derived
from bevquant_hybrid.nn.qat._weighted import Convolution, fused_forms

Conv2d = derived(Convolution, nn.Conv2d, __name__)
ConvReLU2d, ConvReLU62d, ConvAdd2d, ConvAddReLU2d, ConvAddReLU62d = fused_forms(Conv2d)
