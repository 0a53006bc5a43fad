"""Base class and shared functions of fixed-point modules."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bevquant_hybrid import _integer_ops as ops
from bevquant_hybrid.dtype import QuantDType, as_quant_dtype, qinfo
from bevquant_hybrid.nn.qat._base import module_path
from bevquant_hybrid.qtensor import QTensor, along


def integers(module: nn.Module, x: Any, what: str = "input") -> QTensor:
    """Return a tensor that holds integers of 8 or 16 bits.

    Float values of a known scale, from ``QTensor(values, scale, dtype)``, are rounded to integers
    (half up).

    Raises:
        TypeError: It is neither.
    """
    if isinstance(x, QTensor) and x.dtype != "qint32":
        if x.holds_integers:
            return x
        axis, bits = x.q_per_channel_axis(), x.dtype.bits
        values = ops.quantize(x.dequantize(), x.scale, axis, bits, x.rounding)
        return QTensor(values, x.scale, x.dtype, axis, rounding=x.rounding)
    came = f"a QTensor of {x.dtype}" if isinstance(x, QTensor) else type(x).__name__
    raise TypeError(
        f"{module_path(module)} ({type(module).__name__}): its {what} must be a quantized tensor "
        f"of 8 or 16 bits, got {came}; a QuantStub was missing when the model was prepared"
    )


class FixedPoint(nn.Module):
    """Base: output scale, output type and rounding.

    Attributes:
        scale: Value of one output step, ``[1]``.
        dtype: Output type.
        rounding: ``"half_up"`` or ``"half_even"``.
        settings: Attributes copied from its QAT form.
    """

    settings: ClassVar[tuple[str, ...]] = ()
    scale: Tensor

    def __init__(self, source: nn.Module, rounding: str) -> None:
        super().__init__()
        self.rounding = rounding
        self.qualified_name = module_path(source)
        fake_quant: Any = getattr(source, "activation_post_process", None)
        self.dtype: QuantDType | None = None
        if fake_quant is not None:
            self.dtype = as_quant_dtype(fake_quant.dtype)
            self.register_buffer("scale", fake_quant.current_scale().clone())
            self.register_buffer("zero_point", torch.zeros_like(self.scale, dtype=torch.long))
        for name in self.settings:
            setattr(self, name, getattr(source, name))
        self.training = False

    @property
    def bits(self) -> int:
        """Bits of the output."""
        return self.dtype.bits if self.dtype is not None else 32

    def output(self, q: Tensor) -> QTensor:
        """Give integers this module's scale."""
        assert self.dtype is not None
        return QTensor(q, self.scale, self.dtype, rounding=self.rounding)

    def quantized(self, values: Tensor) -> QTensor:
        """Quantize real values of float64."""
        return self.output(ops.quantize(values, self.scale, -1, self.bits, self.rounding))

    def requantized(self, acc: Tensor, scale: Tensor, axis: int = -1) -> QTensor:
        """Requantize accumulators to the output's scale."""
        assert self.dtype is not None
        info = qinfo(self.dtype)
        multiplier = scale.double() / self.scale.double()
        limits = self.bits, info.min, info.max, self.rounding, self.qualified_name
        return self.output(ops.requantize(acc, multiplier, axis, *limits))

    def extra_repr(self) -> str:
        """Print scale and type."""
        return f"scale={self.scale}, dtype={self.dtype}" if self.dtype is not None else ""


def real(x: QTensor) -> Tensor:
    """The values of a fixed-point tensor in float64."""
    return x.int_repr().double() * along(x.scale.double(), x.dim(), x.q_per_channel_axis())
