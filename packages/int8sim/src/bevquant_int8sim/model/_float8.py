r"""FP8 tensors and layers: numbers times numbers, summed exactly, and the error of other sums.

With codes q of FP8 numbers and scales s,

.. math:: y_o = s_x s_{w,o} \sum_i q_{x,i}\, q_{w,o,i} + b_o

Every product is exact in float32 (two significands of 4 bits make 8). The simulator adds products
in float64: multiples of 2⁻¹⁸ of at most 448² in E4M3, so that sums of up to 2¹⁷ products are exact
in any order. The result is rounded once, to float32. An engine sums in float32 or less, in an order
of its own; `Float8Layer.bound` is the largest difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bevquant_int8sim.model._coords import Coords, Geometry
from bevquant_int8sim.model._float_sparse import FloatSparseConv
from bevquant_quantizers import Blocks, Format, format_of, quantize_blocks
from bevquant_sparse import WeightLayout, sparse_conv

FLOAT8 = {form.name: form for form in map(format_of, ((4, 3), (5, 2)))}
_DENSE: dict[str, Callable[..., Tensor]] = {
    "conv1": functional.conv1d,
    "conv2": functional.conv2d,
    "conv3": functional.conv3d,
    "conv_transpose2": functional.conv_transpose2d,
    "linear0": functional.linear,
}


def float8_round(x: Tensor, scale: float, name: str) -> Tensor:
    r"""The nearest values of an FP8 tensor: s · q with q = FP8(x / s).

    ONNX's QuantizeLinear (``saturate=1``) and DequantizeLinear, in float32: ties to even, beyond
    the largest number the largest number, NaN for NaN.

    Args:
        x: Values, float32.
        scale: s, a number of float32.
        name: ``"fp8_e4m3"`` or ``"fp8_e5m2"``.

    Example:
        >>> float8_round(torch.tensor([0.3, 17.0, 999.0]), 1.0, "fp8_e4m3").tolist()
        [0.3125, 16.0, 448.0]
    """
    step = torch.tensor(scale, dtype=torch.float32, device=x.device)
    return _numbers(x, step, FLOAT8[name]) * step


def float8_steps(a: Tensor, b: Tensor, scale: float, name: str) -> int:
    """The largest number of FP8 steps between values of two tensors."""

    def order(x: Tensor) -> Tensor:
        form = FLOAT8[name]
        codes = _numbers(x, torch.tensor(scale, device=x.device), form).to(form.dtype)
        whole = codes.view(torch.uint8).short()
        return torch.where(whole >= 128, 128 - whole, whole)

    return int((order(a) - order(b)).abs().max()) if a.numel() else 0


def _numbers(x: Tensor, scale: Tensor, form: Format) -> Tensor:
    return form.rounded(x.float() / scale)


def blocks_round(x: Tensor, amax: float, name: str, axis: int) -> Tensor:
    """The nearest values of a tensor in a block format (`quantize_blocks`), float32.

    `amax` is the largest absolute value of NVFP4; MX formats do not read it.
    """
    return quantize_blocks(x, name, torch.tensor(amax, device=x.device), axis).values()


ROUNDINGS: tuple[Callable[..., Tensor], ...] = (float8_round, blocks_round)
"""Functions that round to a format of floats: x, scale or amax, and the format's name."""


@dataclass(frozen=True)
class Float8Input:
    """How a layer's input is held: numbers of `form` times `scale`; in blocks up to `scale`."""

    scale: float
    form: Format


class Float8Layer(nn.Module):
    """A convolution or linear layer with FP8 input and weight, and a float32 result.

    Args:
        op: ``"conv"``, ``"conv_transpose"``, ``"linear"`` or ``"sparse_conv"``.
        weight: Numbers of the weight in torch's FP8 type, as the float layer has its weight; of a
            sparse convolution ``[volume, in_channels, out_channels]``.
        weight_scale: float32 ``[out_channels]``.
        bias: float32 ``[out_channels]`` or None.
        input_scale: s_x, a number of float32.
        form: Name of the input's format.
        settings: Stride, padding (a pair for each axis of a convolution) and the like; of a sparse
            convolution ``indice_key`` and the fields of `Geometry`.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        op: str,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        input_scale: float,
        form: str,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", bias)
        self.op, self.input_scale, self.form = op, input_scale, form
        self.settings = dict(settings)

    def forward(self, x: Tensor, coords: Coords | None = None) -> Any:
        """The result; of a sparse convolution features and coordinates."""
        sums, out_coords = self._sums(self._numbers(x), self.weight.double(), coords)
        made = (sums * self._along(self._unit()) + self._along(self.bias)).float()
        return made if coords is None else (made, out_coords)

    def bound(self, x: Tensor, coords: Coords | None = None, *, bits: int = 24) -> Tensor:
        r"""How far sums of another order, in floats of `bits` bits, may be from `forward`.

        .. math:: (n + 3)\, u \Bigl(s_x s_w \sum_i |q_{x,i} q_{w,i}| + |b|\Bigr), \quad
                  u = 2^{1 - \text{bits}}

        to first order in u (N. Higham, Accuracy and Stability of Numerical Algorithms, section
        3.1, with truncation in place of rounding), n the products of one sum; 3 for the scales
        and the bias. Accumulators of float32 have 24 bits; tensor cores of Hopper keep about 14.

        Returns:
            float64, of the result's shape.
        """
        sums, _ = self._sums(self._numbers(x).abs(), self.weight.double().abs(), coords)
        bias = None if self.bias is None else self.bias.abs()
        largest: Tensor = sums * self._along(self._unit()) + self._along(bias)
        return (self.products + 3) * 2.0 ** (1 - bits) * largest

    def in_float(self) -> FloatSparseConv:
        """A sparse convolution with float32 weights, q · s_w, on values of the FP8 input."""
        weight = self.weight.float() * self.weight_scale
        return FloatSparseConv(weight, self.bias, *self._geometry())

    @property
    def products(self) -> int:
        """Products of one sum, at most."""
        shape = self.weight.shape
        if self.op == "sparse_conv":
            return shape[0] * shape[1]
        if self.op == "conv_transpose":
            return math.prod(shape) // shape[1] // int(self.settings["groups"])
        return math.prod(shape[1:])

    def slack(self) -> float:
        """2⁻¹⁴ of the largest sum of magnitudes: what float32 sums of 10⁴ products may lose."""
        weight = self.weight.double().abs()
        axis = {"sparse_conv": 2, "conv_transpose": 1}.get(self.op, 0)
        rows = weight.movedim(axis, 0).flatten(1).sum(1)
        rows = rows.repeat(len(self.weight_scale) // len(rows))  # of groups
        return 2.0**-14 * float((rows * self._unit()).max()) * self._largest

    @property
    def _largest(self) -> float:
        return FLOAT8[self.form].high

    def _numbers(self, x: Tensor) -> Tensor:
        scale = torch.tensor(self.input_scale, dtype=torch.float32, device=x.device)
        return _numbers(x, scale, FLOAT8[self.form]).double()

    def _unit(self) -> Tensor:
        return self.weight_scale.double() * self.input_scale

    def _geometry(self) -> tuple[Geometry, str | None]:
        """Geometry and key of a sparse convolution."""
        settings = dict(self.settings)
        key = settings.pop("indice_key")
        return Geometry(**settings), key

    def _along(self, values: Tensor | None) -> Any:
        """Values of the output channels, beside the sums."""
        if values is None:
            return 0.0
        after = 0 if self.op in ("linear", "sparse_conv") else self.weight.dim() - 2
        return values.double().reshape(-1, *[1] * after)

    def _sums(self, x: Tensor, weight: Tensor, coords: Coords | None) -> tuple[Tensor, Any]:
        if coords is not None:
            rulebook, out = coords.convolved(*self._geometry(), "an FP8 convolution")
            return sparse_conv(x, weight, None, rulebook, layout=WeightLayout.VCK), out
        settings = dict(self.settings)
        if self.op == "conv":
            padding = settings.pop("padding")
            x = functional.pad(x, [side for pair in reversed(padding) for side in pair])
        call = _DENSE[f"{self.op}{weight.dim() - 2}"]
        return call(x, weight, None, **settings), None


def blocks_of(values: Tensor, scales: Tensor, tensor_scale: Tensor, name: str) -> Blocks:
    """Numbers of values that are numbers times these scales, in blocks along axis 1."""
    form = format_of(name)
    unit = Blocks(torch.ones_like(values), scales, tensor_scale, 1, form.block)
    return replace(unit, numbers=form.rounded(values / unit.values()))


class BlockLayer(Float8Layer):
    r"""A linear layer or a convolution of 1×1 with input and weight in a block format.

    .. math:: y_o = \sum_i \hat x_i \hat w_{o,i} + b_o

    of the values \(\hat x, \hat w\), numbers times scales. Sums are in float64 and rounded once, to
    float32.

    Args:
        op: ``"conv"`` or ``"linear"``.
        weight: Numbers and scales of the weight, blocks along axis 1. Buffers: ``weight``, the
            values, ``block_scale`` and ``tensor_scale``, t of NVFP4.
        bias: float32 ``[out_channels]`` or None.
        amax: Largest absolute value of an NVFP4 input, as `blocks_round` has it.
        form: ``"mxfp8"``, ``"mxfp4"`` or ``"nvfp4"``.
        settings: As of `Float8Layer`.
    """

    block_scale: Tensor
    tensor_scale: Tensor

    def __init__(
        self,
        op: str,
        weight: Blocks,
        bias: Tensor | None,
        amax: float,
        form: str,
        settings: Mapping[str, Any],
    ) -> None:
        ones = torch.ones(len(weight.numbers))
        super().__init__(op, weight.values(), ones, bias, amax, form, settings)
        self.register_buffer("block_scale", weight.scales)
        self.register_buffer("tensor_scale", weight.tensor_scale)

    @property
    def blocks(self) -> Blocks:
        """Numbers and scales of the weight."""
        return blocks_of(self.weight, self.block_scale, self.tensor_scale, self.form)

    def _numbers(self, x: Tensor) -> Tensor:
        return x.double()

    def _unit(self) -> Tensor:
        return self.weight_scale.double()

    @property
    def _largest(self) -> float:
        return self.input_scale or 1.0  # MX formats: in units of the input
