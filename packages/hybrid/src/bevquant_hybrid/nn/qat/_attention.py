"""QAT forms of attention and an LSTM cell: products, sums and tables, each with a scale."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from bevquant_hybrid._integer_ops import split_mask
from bevquant_hybrid._quant_stub import QuantStub as FloatQuantStub
from bevquant_hybrid.nn._functions import FloatFunctional as FloatArithmetic
from bevquant_hybrid.nn.qat._base import quantized_input
from bevquant_hybrid.nn.qat._composed import Composed, Softmax, linear_of
from bevquant_hybrid.nn.qat._weighted import Linear
from bevquant_hybrid.nn.qat.functional_modules import FloatFunctional
from bevquant_hybrid.nn.qat.segment_lut import SegmentLUT
from bevquant_hybrid.nn.qat.stubs import QuantStub
from bevquant_hybrid.qtensor import QTensor, payload


class MultiheadAttention(Composed):
    r"""`torch.nn.MultiheadAttention` from quantized parts, for QAT and conversion.

    :math:`\operatorname{softmax}(qk^\top/\sqrt d + mask)\,v` of every head, then the output layer;
    the projections, the product of scores, the mask added, the softmax, the weighted sum and the
    mean of weights over heads have a scale each. Masked positions (True, or −∞) are excluded from
    the softmax; other values of a float mask are quantized and added. The three input projections
    are separate layers, with parameters split from the float module's.
    """

    float_class = nn.MultiheadAttention
    settings = ("embed_dim", "num_heads", "head_dim", "dropout", "batch_first")
    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    kdim: int
    vdim: int
    add_zero_attn: bool
    bias_k: None

    def make_parts(self, source: Any) -> None:
        """Projections, products, the mask's parts and the softmax."""
        refused = {
            "add_bias_kv=True": source.bias_k is not None,
            "add_zero_attn=True": source.add_zero_attn,
            f"kdim={source.kdim}, vdim={source.vdim}": source.in_proj_weight is None,
        }
        for setting, found in refused.items():
            if found:
                raise ValueError(
                    f"{self.qualified_name} (MultiheadAttention): {setting}: a BPU takes "
                    "add_bias_kv=False, add_zero_attn=False and keys and values as wide as the "
                    f"queries ({source.embed_dim}); change that, or run it on the CPU (hybrid_dict)"
                )
        self.kdim = self.vdim = source.embed_dim
        self.add_zero_attn, self.bias_k = False, None
        biases = [None] * 3 if source.in_proj_bias is None else source.in_proj_bias.chunk(3)
        for name, weight, bias in zip("qkv", source.in_proj_weight.chunk(3), biases, strict=True):
            copied = nn.Parameter(weight.detach().clone())
            offset = None if bias is None else nn.Parameter(bias.detach().clone())
            self.part(f"{name}_proj", Linear, linear_of(copied, offset))
        self.part("out_proj", Linear, linear_of(source.out_proj.weight, source.out_proj.bias))
        for name in ("scaling", "scores", "context"):
            self.part(name, FloatFunctional, FloatArithmetic())
        self.part("mask_quant", QuantStub, FloatQuantStub(), needed_for="a float mask")
        self.part("mask_add", FloatFunctional, FloatArithmetic(), needed_for="a float mask")
        self.part("average", FloatFunctional, FloatArithmetic(), needed_for="need_weights=True")
        self.part("softmax", Softmax, nn.Softmax(-1))

    def to_float(self) -> nn.Module:
        """Return a float module with these parameters."""
        made: Any = self.float_source()
        projections = [self.q_proj, self.k_proj, self.v_proj]
        made.in_proj_weight = nn.Parameter(torch.cat([p.weight for p in projections]).detach())
        if self.q_proj.bias is not None:
            made.in_proj_bias = nn.Parameter(torch.cat([p.bias for p in projections]).detach())
        made.out_proj.weight, made.out_proj.bias = self.out_proj.weight, self.out_proj.bias
        found: nn.Module = made
        return found

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; arguments and results as in `torch.nn.MultiheadAttention`, quantized."""
        single = query.dim() == 2
        if single:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            self._heads(projection(x))
            for projection, x in zip(
                (self.q_proj, self.k_proj, self.v_proj), (query, key, value), strict=True
            )
        )
        q = self.scaling.mul_scalar(q, self.head_dim**-0.5)
        scores = self.scores.matmul(q, k, y_trans=True)  # [N, heads, L, S]
        excluded, added = self._masks(scores, attn_mask, key_padding_mask, is_causal)
        if added is not None:
            scores = self.needed("mask_add").add(scores, self.needed("mask_quant")(added))
        masks = () if excluded is None else (excluded,)
        weights = self.softmax(scores, *masks)
        result = self.context.matmul(F.dropout(weights, self.dropout, self.training), v)
        result = result.transpose(1, 2).flatten(2)
        result = self.out_proj(result)
        if need_weights and average_attn_weights:
            weights = self.needed("average").mean(weights, dim=1)
        if single:
            result, weights = result.squeeze(0), weights.squeeze(0)
        elif not self.batch_first:
            result = result.transpose(0, 1)
        return result, weights if need_weights else None

    def _heads(self, x: Tensor) -> Tensor:
        """[N, L, embed_dim] as [N, heads, L, head_dim]."""
        heads: Tensor = x.unflatten(-1, (self.num_heads, self.head_dim))
        return heads.transpose(1, 2)

    def _masks(
        self,
        scores: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Mask of excluded scores, and the addend of the others."""
        size = scores.shape[0], self.num_heads, scores.shape[2], scores.shape[3]
        if is_causal and attn_mask is None:
            ones = torch.ones(size[2], size[3], dtype=torch.bool, device=scores.device)
            attn_mask = ones.triu(1)
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.reshape(size)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.reshape(-1, 1, 1, size[3])
        excluded, added = None, None
        for mask in (attn_mask, key_padding_mask):
            if mask is None:
                continue
            out = mask
            if mask.dtype != torch.bool:
                out, rest = split_mask(mask)
                added = rest if added is None else added + rest
            excluded = out if excluded is None else excluded | out
        if added is not None:
            added = added.expand(size)
        return (None if excluded is None else excluded.expand(size)), added


class LSTMCell(Composed):
    r"""`torch.nn.LSTMCell` from quantized parts, for QAT and conversion.

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
        """A state of zeros, with the input's scale."""
        if isinstance(x, Proxy):  # the parts are traced for a file
            # Made of the input: a new tensor would be a constant without a scale.
            return F.pad(x.clamp(0, 0), (0, self.hidden_size - self.input_size))
        quantized_input(self, x)  # names this module where it is a float tensor
        zeros = torch.zeros(
            x.shape[0], self.hidden_size, dtype=payload(x).dtype, device=payload(x).device
        )
        return x.like(zeros) if isinstance(x, QTensor) else zeros
