"""Steps of layers with weights: linear, convolutions, transposed and sparse ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from bevquant_int8sim._conv import (
    int8_conv1d,
    int8_conv2d,
    int8_conv3d,
    int8_conv_transpose2d,
    int8_linear,
)
from bevquant_int8sim._scales import integer_range
from bevquant_int8sim._sparse_conv import int8_sparse_conv
from bevquant_int8sim.model._coords import Extent, Geometry
from bevquant_int8sim.model._form import ACCUMULATORS, Integers, dtype_of
from bevquant_int8sim.model._integer_steps import Positive, Rounds, Stored
from bevquant_int8sim.model._rowwise import add
from bevquant_int8sim.model._step import Given, numbers_in
from bevquant_quantizers.documents import Size
from bevquant_sparse import WeightLayout

Sides = tuple[tuple[Size, Size], ...]
"""Zeros in front of and after each axis."""

_LARGEST_STRIDE = 1024  # kernels take a time that grows with it


@dataclass(frozen=True, eq=False, kw_only=True)
class Weighted(Stored, Rounds):
    """A layer: (Σ x·w + b) · multiplier, of an integer weight; the base of four kinds."""

    # Int8, in the layout that the kernel reads; FP8 in programs for files.
    weight: Tensor
    # int32 ``[out_channels]`` in units of the accumulator; float in programs for files.
    bias: Tensor | None = None
    # float64 ``[out_channels]``: s_x·s_w / s_y, or s_x·s_w of floats.
    multiplier: Tensor | None = None
    # float64 ``[out_channels]``: s_x·s_w of a layer that keeps its accumulators.
    scale: Tensor | None = None
    # In programs for files that do not run here: s_w, ``[out_channels]``.
    weight_scale: Tensor | None = None
    # In programs for files: scales of a weight in blocks.
    block_scale: Tensor | None = None

    # Axis of the channels of the result.
    channel_axis: ClassVar[int] = -1
    # Axis of the output channels, or of those of a group, of the weight.
    out_axis: ClassVar[int] = 0
    # Axes that the weight may have.
    ranks: ClassVar[tuple[int, ...]]

    @property
    def keeps_accumulators(self) -> bool:
        """Whether the result is the plain accumulators."""
        plain = not self.relu and self.ceiling is None and self.multiplier is None
        return plain and self.form == ACCUMULATORS

    def accumulators(self, args: Given, backend: str) -> Tensor:
        """The int32 accumulators, before they are requantized."""
        bare = replace(self, form=ACCUMULATORS, relu=False, ceiling=None, multiplier=None)
        result: Tensor = bare._compute(args, {}, backend)[0]
        return result

    @property
    def unit(self) -> Tensor:
        """Value of one unit of each accumulator, s_x·s_w, float64 ``[out_channels]``."""
        factors = self.scale if self.multiplier is None else self.multiplier
        assert factors is not None
        return factors * self.form.scale if isinstance(self.form, Integers) else factors

    @property
    def out_channels(self) -> int:
        """Number of output channels."""
        return self.weight.shape[self.out_axis]

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the kernel that the step's fields give, without tensors."""
        return {
            "relu": self.relu,
            "out_dtype": dtype_of(self.form),
            "narrow_range": isinstance(self.form, Integers) and self.form.narrow,
            "rounding": self.rounding,
            "arithmetic": self.arithmetic,
            "name": self.path,
        }

    def check(self) -> None:
        """Check types and shapes of the tensors."""
        super().check()
        shape = tuple(self.weight.shape)
        _expect(self.weight, "weight", torch.int8)
        if len(shape) not in self.ranks:
            raise ValueError(f"a weight of shape {shape} is none of {self.op}")
        self._check_geometry()
        if self.bias is not None:
            _expect(self.bias, "bias", torch.int32, self.out_channels)
        for name in ("multiplier", "scale"):
            factors: Tensor | None = getattr(self, name)
            if factors is not None:
                _expect(factors, name, torch.float64, self.out_channels)
        if self.form != ACCUMULATORS and self.multiplier is None:
            raise ValueError("the tensor multiplier is missing")

    def _check_geometry(self) -> None:
        if not self.weight.numel():
            raise ValueError(f"a weight of shape {tuple(self.weight.shape)}")


def _expect(tensor: Tensor, name: str, dtype: torch.dtype, channels: int | None = None) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}")
    if channels is not None and tuple(tensor.shape) != (channels,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected ({channels},)")


@dataclass(frozen=True, eq=False, kw_only=True)
class Dense(Weighted):
    """A layer of a dense tensor; the base of three kinds."""

    # Of a second operand, which is added before the rounding.
    addend_multiplier: Positive | None = None

    reads: ClassVar[tuple[int, int] | None] = (1, 2)
    # Fields that the kernel takes as they are.
    windows: ClassVar[tuple[str, ...]] = ()
    kernels: ClassVar[Mapping[int, Callable[..., Tensor]]]

    def _compute(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        settings = self._settings
        if len(args) > 1:
            if tuple(args[1].shape) != self._result_shape(args[0]):
                return (self._broadcast_sum(args, backend),)
            added = {"addend": args[1], "addend_multiplier": self.addend_multiplier}
            settings = {**settings, **added}
        kernel = self.kernels[self.weight.dim()]
        tensors = args[0], self.weight, self.bias
        return (kernel(*tensors, multiplier=self.multiplier, backend=backend, **settings),)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return self.settings | {name: getattr(self, name) for name in self.windows}

    def _result_shape(self, x: Tensor) -> tuple[int, ...]:
        raise NotImplementedError

    def _broadcast_sum(self, args: Given, backend: str) -> Tensor:
        """The sum with an addend of another shape: one of the two is broadcast."""
        assert self.multiplier is not None
        added = torch.tensor(self.addend_multiplier, dtype=torch.float64)
        low, high = integer_range(8, self.integers.narrow)
        operands = [self.accumulators(args[:1], backend), args[1]]
        low = 0 if self.relu else low
        return add(operands, [self.multiplier, added], 1.0, self.channel_axis, low, high)

    def cost(self, given: Given, made: Given, products: int) -> int:
        """Products of all outputs."""
        return int(made[0].numel()) * self.weight[0].numel()

    def check(self) -> None:
        """Check that an addend has its multiplier."""
        super().check()
        if len(self.args) > 1 and self.addend_multiplier is None:
            raise ValueError("the multiplier of the addend is missing")


@dataclass(frozen=True, eq=False, kw_only=True)
class Linear(Dense):
    """`int8_linear`."""

    op = "linear"
    ranks = (2,)
    kernels: ClassVar = {2: int8_linear}


@dataclass(frozen=True, eq=False, kw_only=True)
class Conv(Dense):
    """`int8_conv1d`, `int8_conv2d` or `int8_conv3d`; settings for each axis, as in torch."""

    stride: tuple[Extent, ...]
    padding: Sides
    dilation: tuple[Extent, ...]
    groups: Extent

    op = "conv"
    channel_axis = 1
    ranks = (3, 4, 5)
    windows = ("stride", "padding", "dilation", "groups")
    kernels: ClassVar = {3: int8_conv1d, 4: int8_conv2d, 5: int8_conv3d}

    def _result_shape(self, x: Tensor) -> tuple[int, ...]:
        sizes, kernel = x.shape[2:], self.weight.shape[2:]
        sides = zip(sizes, kernel, self.stride, self.padding, self.dilation, strict=True)
        grid = ((n + sum(pad) - d * (k - 1) - 1) // s + 1 for n, k, s, pad, d in sides)
        return (len(x), self.out_channels, *grid)

    def _check_geometry(self) -> None:
        _check_sizes(self.weight.dim() - 2, self.stride, self.padding, self.dilation)
        _check_groups(self.weight, self.out_channels, self.groups)


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvTranspose(Dense):
    """`int8_conv_transpose2d`; settings for each axis, as in torch."""

    stride: tuple[Extent, ...]
    padding: tuple[Size, ...]
    output_padding: tuple[Size, ...]
    dilation: tuple[Extent, ...]
    groups: Extent

    op = "conv_transpose"
    channel_axis = 1
    out_axis = 1
    ranks = (4,)
    windows = ("stride", "padding", "output_padding", "dilation", "groups")
    kernels: ClassVar = {4: int8_conv_transpose2d}

    @property
    def out_channels(self) -> int:
        """Number of output channels."""
        return self.weight.shape[1] * self.groups

    def cost(self, given: Given, made: Given, products: int) -> int:
        """Products of all inputs."""
        return int(given[0].numel()) * self.weight[0].numel()

    def _check_geometry(self) -> None:
        axes, pads = self.weight.dim() - 2, (self.padding, self.output_padding)
        _check_sizes(axes, self.stride, *pads, self.dilation)
        _check_groups(self.weight, self.out_channels, self.groups)


def _check_groups(weight: Tensor, channels: int, groups: int) -> None:
    if not weight.numel() or channels % groups:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} in groups that differ")


def _check_sizes(axes: int, *settings: tuple[Any, ...]) -> None:
    for sizes in settings:
        if len(sizes) != axes:
            raise ValueError(f"{sizes} for {axes} axes")
    if any(number > _LARGEST_STRIDE for number in numbers_in(settings)):
        shown = [*settings]
        raise ValueError(f"strides, paddings and dilations {shown}: above {_LARGEST_STRIDE}")


@dataclass(frozen=True, eq=False, kw_only=True)
class SparseConv(Weighted):
    """`int8_sparse_conv` of features and coordinates; makes both."""

    # Kernel size, stride and the like.
    geometry: Geometry
    # Name under which an inverse convolution finds this one.
    indice_key: str | None = None
    # Of the sum with a third argument, the residual.
    sum_multiplier: Positive = 1.0

    op = "sparse_conv"
    out_axis = 2
    ranks = (3,)
    reads = (2, 3)
    operands = 2
    makes = 2

    def _compute(self, args: Given, kwargs: dict[str, Any], backend: str) -> Given:
        features, coords, *residual = args
        rulebook, out_coords = coords.convolved(self.geometry, self.indice_key, self.path)
        out = int8_sparse_conv(
            features, self.weight, self.bias, rulebook, layout=WeightLayout.VCK,
            multiplier=self.multiplier, residual=residual[0] if residual else None,
            sum_multiplier=self.sum_multiplier, backend=backend, **self.settings,
        )  # fmt: skip
        return out, out_coords

    def cost(self, given: Given, made: Given, products: int) -> int:
        """Pairs · in · out channels."""
        rulebook, _ = given[1].convolved(self.geometry, self.indice_key, self.path)
        return int(rulebook.num_pairs) * self.weight[0].numel()

    def _check_geometry(self) -> None:
        super()._check_geometry()
        g = self.geometry
        axes = len(g.kernel_size)
        _check_sizes(axes, g.stride, g.padding, g.dilation, g.output_padding)
        if math.prod(g.kernel_size) != self.weight.shape[0]:
            raise ValueError(
                f"{self.weight.shape[0]} kernel elements do not fit kernel_size={g.kernel_size}"
            )
