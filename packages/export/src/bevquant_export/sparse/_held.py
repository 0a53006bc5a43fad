"""How a tensor is held while a file runs; every reader takes it in the form that it wants."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bevquant_int8sim import dequantize, int8_add, quantize, requantize


@dataclass(frozen=True, eq=False)
class Floats:
    """float32 values."""

    values: Tensor

    def selected(self, channels: Tensor, relu: bool) -> Floats:
        """Some channels."""
        values = self.values[:, channels]
        return Floats(values.clamp(min=0) if relu else values)

    def floats(self) -> Tensor:
        """The values."""
        return self.values

    def integers(self, scale: float, name: str) -> Tensor:
        """round(x / scale), clamped to int8."""
        return quantize(self.values, scale, name=name)


@dataclass(frozen=True, eq=False)
class Integers:
    """int8 integers of one scale."""

    values: Tensor
    scale: float

    def selected(self, channels: Tensor, relu: bool) -> Integers:
        """Some channels."""
        values = self.values[:, channels]
        return Integers(values.clamp(min=0) if relu else values, self.scale)

    def floats(self) -> Tensor:
        """The integers times their scale."""
        return dequantize(self.values, self.scale)

    def integers(self, scale: float, name: str) -> Tensor:
        """The integers, which have that scale already."""
        if scale == self.scale:
            return self.values
        return requantize(self.values.to(torch.int32), self.scale / scale, name=name)


@dataclass(frozen=True, eq=False)
class Accumulators:
    """int32 sums of a convolution whose output is fp16: each reader rounds them once.

    Attributes:
        values: ``[rows, channels]``.
        scale: float64 ``[channels]``.
        relu: Whether a ReLU belongs to it.
    """

    values: Tensor
    scale: Tensor
    relu: bool

    def selected(self, channels: Tensor, relu: bool) -> Accumulators:
        """Some channels, not yet rounded."""
        return Accumulators(self.values[:, channels], self.scale[channels], self.relu or relu)

    def floats(self) -> Tensor:
        """float32(acc · scale)."""
        values = dequantize(self.values, self.scale, axis=-1)
        return values.clamp_(min=0) if self.relu else values

    def integers(self, scale: float, name: str) -> Tensor:
        """round(acc · (scale of the sum / scale))."""
        return requantize(self.values, self.scale / scale, axis=-1, relu=self.relu, name=name)


@dataclass(frozen=True, eq=False)
class Sum:
    """The sum of two int8 tensors, before it is rounded to a form.

    Attributes:
        a: int8.
        b: int8.
        scale_a: Of `a`.
        scale_b: Of `b`.
        relu: Whether a ReLU follows.
    """

    a: Tensor
    b: Tensor
    scale_a: float
    scale_b: float
    relu: bool = False

    def selected(self, channels: Tensor, relu: bool) -> Sum:
        """Some channels, not yet rounded."""
        parts = self.a[:, channels], self.b[:, channels]
        return Sum(*parts, self.scale_a, self.scale_b, self.relu or relu)

    def floats(self) -> Tensor:
        """The sum a · scale_a + b · scale_b in float64, rounded to float32."""
        total = self.a.double() * self.scale_a + self.b.double() * self.scale_b
        return (total.clamp_(min=0) if self.relu else total).float()

    def integers(self, scale: float, name: str) -> Tensor:
        """round((a + b) · (s / scale)) of equal scales, else each with its own factor."""
        if self.scale_a == self.scale_b:
            total = self.a.to(torch.int32) + self.b.to(torch.int32)
            return requantize(total, self.scale_a / scale, relu=self.relu, name=name)
        factors = self.scale_a / scale, self.scale_b / scale
        return int8_add(self.a, self.b, *factors, relu=self.relu, name=name)


Held = Floats | Integers | Accumulators | Sum
