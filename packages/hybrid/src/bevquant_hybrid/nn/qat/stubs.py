"""Boundaries of the quantized parts of a QAT model."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from bevquant_hybrid._fake_quant._fake_quantize import CalibFakeQuantize, FakeQuantize
from bevquant_hybrid._observers import FixedScaleObserver
from bevquant_hybrid.nn.qat._base import OfFloat, quantized_output, scaling_qconfig, take_over
from bevquant_hybrid.qtensor import QTensor, as_float, of_each

MARKS = "bevquant_hybrid.marks"  # domain of operators in files


def mark_forced(x: Tensor) -> Tensor:
    """Mark a value whose consumer runs on the CPU by the user's choice."""
    result: Tensor = _Mark.apply(x)
    return result


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def symbolic(g: Any, x: Any) -> Any:
        return g.op(f"{MARKS}::Forced", x).setType(x.type())


class QuantStub(OfFloat):
    """Quantize the input.

    A quantized input keeps its scale, which the stub adopts.
    """

    activation_post_process: Any

    @classmethod
    def from_float(cls, source: nn.Module, qconfig: Any = None) -> Self:
        """Take over a stub; one with a scale keeps that scale.

        Raises:
            ValueError: No qconfig, or one without an activation.
        """
        qconfig = scaling_qconfig(source, qconfig)
        self = super().from_float(source, qconfig)
        fake_quant = qconfig.activation()
        scale = getattr(source, "scale", None)
        if scale is not None:
            kind = CalibFakeQuantize if isinstance(fake_quant, CalibFakeQuantize) else FakeQuantize
            fake_quant = kind(observer=FixedScaleObserver, scale=scale, dtype=fake_quant.dtype)
        self.activation_post_process = fake_quant
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Quantize."""
        if isinstance(x, QTensor):
            if isinstance(self.activation_post_process, FakeQuantize) and x.has_one_scale:
                self.activation_post_process.set_qparams(x.scale)
            return x
        return quantized_output(self, x)

    def extra_repr(self) -> str:
        """Print as the float stub."""
        return ""


class DeQuantStub(nn.Module):
    """Return plain float tensors: of a quantized tensor, or of all in lists, tuples and dicts.

    Example:
        >>> import torch
        >>> DeQuantStub()([QTensor(torch.ones(1), torch.ones(1), "qint8"), None])
        [tensor([1.]), None]

    Attributes:
        forced: Whether a user put on the CPU what reads the result, though a BPU could run it.
    """

    forced = False
    _float_class: type[nn.Module]

    @classmethod
    def from_float(cls, source: nn.Module, qconfig: Any = None) -> Self:
        """Take over a stub."""
        made = take_over(cls, source)
        made._float_class = type(source)
        return made

    def to_float(self) -> nn.Module:
        """Return the float stub; an inserted boundary returns itself."""
        if "_float_class" not in self.__dict__:
            return self
        made: nn.Module = take_over(self.__dict__["_float_class"], self)
        made.__dict__.pop("_float_class")
        return made

    def forward(self, x: Any) -> Any:
        """Dequantize."""
        return of_each(x, self._of_tensor)

    def _of_tensor(self, x: Tensor) -> Tensor:
        marks = self.forced and torch.onnx.is_in_onnx_export()
        # The mark is drawn by the exporter based on torch.jit alone.
        marks = marks and not torch.compiler.is_exporting()
        return mark_forced(as_float(x)) if marks else as_float(x)
