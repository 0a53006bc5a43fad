"""A recurrent cell that trains quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid.nn._arithmetic import FloatFunctional as FloatArithmetic
from bevquant_hybrid.nn.qat._base import quantized_input
from bevquant_hybrid.nn.qat._parts import Composed, linear_of
from bevquant_hybrid.nn.qat.functional_modules import FloatFunctional
from bevquant_hybrid.nn.qat.linear import Linear
from bevquant_hybrid.nn.qat.segment_lut import SegmentLUT
from bevquant_hybrid.qtensor import QTensor, payload

__all__ = ["LSTMCell"]


class LSTMCell(Composed):
    r"""`torch.nn.LSTMCell` out of quantized parts, trained and converted alike.

    :math:`g = W_i x + b_i + W_h h + b_h`, :math:`c' = \sigma(g_f) c + \sigma(g_i) \tanh(g_g)`,
    :math:`h' = \sigma(g_o) \tanh(c')`: both products, their sum, the tables and the three products
    of gates have a scale each, the same at every step of a sequence. Parameters are shared with
    the float cell.
    """

    float_class = nn.LSTMCell
    settings = ("input_size", "hidden_size")
    input_size: int
    hidden_size: int

    def make_parts(self, source: Any) -> None:
        """Both products, sums, tables and products of gates."""
        biases = (source.bias_ih, source.bias_hh) if source.bias else (None, None)
        self.part("input_proj", Linear, linear_of(source.weight_ih, biases[0]))
        self.part("hidden_proj", Linear, linear_of(source.weight_hh, biases[1]))
        for name in ("gates", "keep", "write", "cell", "hidden"):
            self.part(name, FloatFunctional, FloatArithmetic())
        for name in ("input_gate", "forget_gate", "output_gate"):
            self.part(name, SegmentLUT, nn.Sigmoid())
        for name in ("candidate", "squashed"):
            self.part(name, SegmentLUT, nn.Tanh())

    def to_float(self) -> nn.Module:
        """Return a float cell that shares these parameters."""
        made: nn.Module = self.float_source()
        for suffix, layer in (("ih", self.input_proj), ("hh", self.hidden_proj)):
            setattr(made, f"weight_{suffix}", layer.weight)
            if layer.bias is not None:
                setattr(made, f"bias_{suffix}", layer.bias)
        return made

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            input: Quantized ``[N, input_size]`` or ``[input_size]``.
            hx: Quantized hidden and cell state, ``[N, hidden_size]``; None for zeros.

        Returns:
            The next hidden and cell state.
        """
        single = input.dim() == 1
        x = input.unsqueeze(0) if single else input
        if hx is None:
            quantized_input(self, x)  # names this module where it is a float tensor
            hidden = cell = self._zeros(x)
        else:
            hidden, cell = (state.unsqueeze(0) if single else state for state in hx)
        gates = self.gates.add(self.input_proj(x), self.hidden_proj(hidden))
        first, second, third, fourth = gates.chunk(4, 1)
        kept = self.keep.mul(self.forget_gate(second), cell)
        written = self.write.mul(self.input_gate(first), self.candidate(third))
        cell = self.cell.add(kept, written)
        hidden = self.hidden.mul(self.output_gate(fourth), self.squashed(cell))
        return (hidden.squeeze(0), cell.squeeze(0)) if single else (hidden, cell)

    def _zeros(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(
            x.shape[0], self.hidden_size, dtype=payload(x).dtype, device=payload(x).device
        )
        return x.like(zeros) if isinstance(x, QTensor) else zeros
