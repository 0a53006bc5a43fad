"""Normalizations that train quantized."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from bevquant_hybrid.nn._arithmetic import FloatFunctional as FloatArithmetic
from bevquant_hybrid.nn._layer_norm import InverseNorm
from bevquant_hybrid.nn._layer_norm import LayerNorm as AnyAxesLayerNorm
from bevquant_hybrid.nn._layer_norm import Normalize as FloatNormalize
from bevquant_hybrid.nn.qat._base import OutputQuantized
from bevquant_hybrid.nn.qat._parts import Composed, of_16_bits
from bevquant_hybrid.nn.qat.conv2d import Conv2d
from bevquant_hybrid.nn.qat.functional_modules import FloatFunctional
from bevquant_hybrid.nn.qat.segment_lut import SegmentLUT

__all__ = ["GroupNorm", "LayerNorm", "Normalize", "RMSNorm"]


class LayerNorm(OutputQuantized, AnyAxesLayerNorm):
    """Layer norm with a scale of its own."""


class RMSNorm(OutputQuantized, nn.RMSNorm):
    """RMS norm with a scale of its own."""


class GroupNorm(Composed):
    """`torch.nn.GroupNorm` in two steps: every group's layer norm, then weight and bias.

    The second step is a convolution by 1×1 with a group per channel. Its parameters are made of
    the float module's.
    """

    float_class = nn.GroupNorm
    settings = ("num_groups", "num_channels")
    num_groups: int
    num_channels: int

    def make_parts(self, source: Any) -> None:
        """The norm of every group, and the convolution."""
        norm = AnyAxesLayerNorm(1, source.eps, elementwise_affine=False, dim=-1)
        self.part("norm", LayerNorm, norm)
        if source.weight is None:
            self.register_module("affine", None)
        else:
            channels = self.num_channels
            shift = source.bias is not None
            affine = nn.Conv2d(channels, channels, 1, groups=channels, bias=shift)
            affine.weight = nn.Parameter(source.weight.detach().reshape(-1, 1, 1, 1).clone())
            if source.bias is not None:
                affine.bias = nn.Parameter(source.bias.detach().clone())
            self.part("affine", Conv2d, affine)

    def to_float(self) -> nn.Module:
        """Return a float module with these parameters."""
        made: Any = self.float_source()
        if self.affine is not None:
            made.weight = nn.Parameter(self.affine.weight.detach().reshape(-1))
            if self.affine.bias is not None:
                made.bias = self.affine.bias
        found: nn.Module = made
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[N, C, …]``."""
        shape = x.shape
        rows: Tensor = self.norm(x.reshape(shape[0], self.num_groups, -1))
        if self.affine is None:
            return rows.reshape(shape)
        result: Tensor = self.affine(rows.reshape(shape[0], self.num_channels, -1, 1))
        return result.reshape(shape)


class Normalize(Composed):
    """x·f(Σx²) with the table f = 1/max(√x, ε): squares, their sum and f in 16 bits."""

    float_class = FloatNormalize
    settings = ("dim",)
    one_operator = True
    dim: Any

    def make_parts(self, source: Any) -> None:
        """Squares, their sum, the table and the product."""
        inner = of_16_bits(self.qconfig)
        self.part("square", FloatFunctional, FloatArithmetic(), qconfig=inner)
        self.part("sum", FloatFunctional, FloatArithmetic(), qconfig=inner)
        self.part("inverse", SegmentLUT, InverseNorm(source.eps), qconfig=inner)
        self.part("mul", FloatFunctional, FloatArithmetic())

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        squares = self.square.mul(x, x)
        inverse = self.inverse(self.sum.sum(squares, dim=self.dim, keepdim=True))
        result: Tensor = self.mul.mul(x, inverse)
        return result
