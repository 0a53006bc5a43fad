"""Multi-head attention that trains quantized: its products, sums and softmax, each with a scale."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_hybrid._integer_ops import split_mask
from bevquant_hybrid._quant_stub import QuantStub as FloatQuantStub
from bevquant_hybrid.nn._arithmetic import FloatFunctional as FloatArithmetic
from bevquant_hybrid.nn.qat._parts import Composed, linear_of
from bevquant_hybrid.nn.qat.functional_modules import FloatFunctional
from bevquant_hybrid.nn.qat.linear import Linear
from bevquant_hybrid.nn.qat.softmax import Softmax
from bevquant_hybrid.nn.qat.stubs import QuantStub

__all__ = ["MultiheadAttention"]


class MultiheadAttention(Composed):
    r"""`torch.nn.MultiheadAttention` out of quantized parts, trained and converted alike.

    :math:`\operatorname{softmax}(qk^\top/\sqrt d + mask)\,v` of every head, then the output layer;
    the projections, the product of scores, the mask added, the softmax, the weighted sum and the
    mean of weights over heads have a scale each. What a mask excludes (True, or −∞) takes no part
    in the softmax; other values of a float mask are quantized and added. The three input
    projections are layers of their own, with parameters split off the float module's.
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
        """Attend; arguments and results as `torch.nn.MultiheadAttention` has them, quantized."""
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
        """Which scores are excluded, and what is added to the others."""
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
