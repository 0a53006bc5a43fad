"""Softmax that trains quantized: the five steps that a BPU takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfig

from bevquant_hybrid import _integer_ops as ops
from bevquant_hybrid._fake_quant._fake_quantize import CalibFakeQuantize, FakeQuantize
from bevquant_hybrid._observers._range import FixedScaleObserver
from bevquant_hybrid.dtype import qint16
from bevquant_hybrid.nn._arithmetic import FloatFunctional as FloatArithmetic
from bevquant_hybrid.nn._functions import Exp, Reciprocal
from bevquant_hybrid.nn.qat._base import quantized_input, scaling_qconfig
from bevquant_hybrid.nn.qat._parts import Composed, of_16_bits
from bevquant_hybrid.nn.qat.functional_modules import FloatFunctional
from bevquant_hybrid.nn.qat.segment_lut import SegmentLUT
from bevquant_hybrid.qtensor import QTensor, payload

__all__ = ["Softmax"]

_EXP_SCALE = 1 / 32767.5  # of values in (0, 1], in 16 bits


class Softmax(Composed):
    r"""`torch.nn.Softmax` in the steps that the documents print, trained and converted alike.

    :math:`y = e \cdot (1/\sum e)` with :math:`e = \exp(x - \max x)`: difference, exponential, sum
    and reciprocal in 16 bits, the exponential with the scale 1/32767.5; the product has the type
    and the scale of the module's qconfig.
    """

    float_class = nn.Softmax
    settings = ("dim",)
    one_operator = True
    dim: int | None

    def make_parts(self, source: Any) -> None:
        """Difference, exponential, sum, reciprocal and product."""
        qconfig = scaling_qconfig(source, self.qconfig)
        inner = of_16_bits(qconfig)
        self.part("sub", FloatFunctional, FloatArithmetic(), qconfig=inner)
        self.part("exp", SegmentLUT, Exp(), qconfig=_of_exponential(qconfig))
        self.part("sum", FloatFunctional, FloatArithmetic(), qconfig=inner)
        self.part("reciprocal", SegmentLUT, Reciprocal(), qconfig=inner)
        self.part("mul", FloatFunctional, FloatArithmetic())

    def forward(self, x: Tensor, excluded: Tensor | None = None) -> Tensor:
        """Normalize.

        Args:
            x: Quantized.
            excluded: Where True, a value counts as −∞; a row without others gives zeros.
        """
        dim = self.dim
        if dim is None:  # torch's own choice
            dim = 0 if x.dim() in (0, 1, 3) else 1
        drawn = torch.onnx.is_in_onnx_export()  # as one operator of 8 bits
        if not isinstance(x, QTensor) or (drawn and not x.holds_integers):
            return self._at_once(quantized_input(self, x), excluded, dim)
        if excluded is not None:
            x = _filled(x, excluded, lowest=True, dim=dim)
        shifted = self.sub.sub(x, x.max(dim, keepdim=True)[0])
        exponential = self.exp(shifted)
        if excluded is not None:
            exponential = _filled(exponential, excluded, lowest=False, dim=dim)
        inverse = self.reciprocal(self.sum.sum(exponential, dim=dim, keepdim=True))
        result: QTensor = self.mul.mul(exponential, inverse)
        return result if excluded is None else _filled(result, excluded, lowest=False)

    def _at_once(self, values: Tensor, excluded: Tensor | None, dim: int) -> Tensor:
        if excluded is not None:
            values = values.masked_fill(excluded, -torch.inf)
        shares = values.softmax(dim)
        if excluded is not None:
            shares = shares.masked_fill(excluded, 0.0)
        quantized: Tensor = self.mul.activation_post_process(shares)
        return quantized

    def extra_repr(self) -> str:
        """Print the axis, as torch does."""
        return f"dim={self.dim}"


def _of_exponential(qconfig: Any) -> QConfig:
    kind: Any = FakeQuantize
    if isinstance(qconfig.activation(), CalibFakeQuantize):
        kind = CalibFakeQuantize
    fixed = kind.with_args(observer=FixedScaleObserver, scale=_EXP_SCALE, dtype=qint16)
    return QConfig(activation=fixed, weight=None)


def _filled(x: QTensor, excluded: Tensor, *, lowest: bool, dim: int | None = None) -> QTensor:
    """The tensor with its smallest value, or 0, where values are excluded."""
    if x.holds_integers:
        return x.like(ops.exclude(x.int_repr(), excluded, lowest, dim))
    return x.like(ops.filled(payload(x), excluded, lowest, dim))
