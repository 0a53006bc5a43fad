"""torch's multi-head attention with quantized projections, and with quantized products if asked."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_graph import own_code
from bevquant_qnn._conv import QuantLinear
from bevquant_qnn._matmul import QuantAttention
from bevquant_qnn._takeover import attach_quantizer, no_source, take_over
from bevquant_quantizers import QuantDescriptor


class QuantProjection(QuantLinear):
    """One of an attention's input projections: a linear layer over rows of the attention's weight.

    y = fq(x)·fq(w)ᵀ + b, where w and b are ``in_proj_weight[rows]`` and ``in_proj_bias[rows]`` of
    the attention (or its ``q_proj_weight``, …). They stay the attention's parameters: this layer
    has none of its own, so names in the state dict and optimizers are as before. Ranges run along
    the output channels, so that three such layers hold what one over all rows would. `name` is
    ``"q"``, ``"k"`` or ``"v"``.
    """

    float_class = nn.Linear

    def __init__(
        self,
        attention: nn.MultiheadAttention,
        name: str,
        *,
        quant_desc_input: QuantDescriptor | None = None,
        quant_desc_weight: QuantDescriptor | None = None,
    ) -> None:
        # Not nn.Linear's, which makes parameters.
        nn.Module.__init__(self)
        self.__dict__["_attention"] = attention  # no child: the attention is the parent
        self._projection = name
        sizes = {"q": attention.embed_dim, "k": attention.kdim, "v": attention.vdim}
        self.in_features, self.out_features = sizes[name], attention.embed_dim
        self._add_quantizers(quant_desc_input, quant_desc_weight)
        self.train(attention.training).to(self.weight.device)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The rows of the attention's weight, [embed_dim, in_features]."""
        attention: Any = self.__dict__["_attention"]
        if attention.in_proj_weight is None:
            weight: Tensor = getattr(attention, f"{self._projection}_proj_weight")
            return weight
        return self._rows(attention.in_proj_weight)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The rows of the attention's bias, [embed_dim]."""
        bias = self.__dict__["_attention"].in_proj_bias
        return None if bias is None else self._rows(bias)

    def _rows(self, packed: Tensor) -> Tensor:
        return packed.narrow(0, "qkv".index(self._projection) * self.out_features,
                             self.out_features)  # fmt: skip


class QuantMultiheadAttention(nn.MultiheadAttention):
    r"""`torch.nn.MultiheadAttention` on fake-quantized inputs and weights of its projections.

    .. math:: \operatorname{softmax}\Bigl(\tfrac{q k^T}{\sqrt{d}} + m\Bigr)\, v,
              \quad q = fq(x_q)\,fq(W_q)^T + b_q, \; …

    Arguments, results and state-dict keys are those of torch; products of activations stay float,
    or are those of a `QuantAttention`, ``quant_attention``.
    Torch's fused forms, which read the weights past the quantizers, are not used. Where q, k and v
    are projections of one tensor, `quantize_model` gives them one quantizer.

    Made by `from_float`.
    """

    float_class = nn.MultiheadAttention
    q_proj: QuantProjection
    k_proj: QuantProjection
    v_proj: QuantProjection

    @classmethod
    def from_float(
        cls,
        module: nn.MultiheadAttention,
        *,
        quant_desc_input: QuantDescriptor | None = None,
        quant_desc_weight: QuantDescriptor | None = None,
        quantize_out: bool = True,
        quantize_matmul: bool = False,
    ) -> Self:
        """Return the quantized form of a float attention, holding its own parameters.

        Args:
            module: The attention.
            quant_desc_input: Descriptor of the input quantizers; 8 bit per tensor by default.
            quant_desc_weight: Descriptor of the weight quantizers; 8 bit per output channel.
            quantize_out: Whether ``out_proj`` is quantized, too.
            quantize_matmul: Whether both products of the attention are.

        Raises:
            TypeError: `module` is none, or has code of its own.

        Example:
            >>> import torch
            >>> attention = QuantMultiheadAttention.from_float(nn.MultiheadAttention(8, 2))
            >>> x = torch.ones(3, 1, 8)
            >>> attention(x, x, x)[0].shape
            torch.Size([3, 1, 8])
        """
        if not isinstance(module, cls.float_class) or own_code(module, cls.float_class):
            raise no_source(cls, module)
        made = take_over(cls.__new__(cls), module)
        settings: Any = {
            "quant_desc_input": quant_desc_input,
            "quant_desc_weight": quant_desc_weight,
        }
        for name in "qkv":
            made.add_module(f"{name}_proj", QuantProjection(made, name, **settings))
        if quantize_out:
            made.add_module("out_proj", QuantLinear.from_float(made.out_proj, **settings))
        if quantize_matmul:
            attach_quantizer(
                made, "quant_attention", QuantAttention(quant_desc_input=quant_desc_input)
            )
        return made

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
        """Attend, as torch's forward. `is_causal` only describes `attn_mask`."""
        if is_causal and attn_mask is None:
            raise ValueError(
                f"{type(self).__name__}: is_causal=True without attn_mask; give the mask too, "
                "nn.Transformer.generate_square_subsequent_mask makes it"
            )
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(len(k), -1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(len(v), -1, -1)], 1)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        mask = self._mask(attn_mask, key_padding_mask, k.shape[2] - key.shape[1], q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        attention: Any = self._modules.get("quant_attention")
        if attention is not None:
            made, weights = attention.attend(q, k, v, mask, dropout)
        elif need_weights:
            # As torch does it: the queries are scaled, not the products.
            weights = q * math.sqrt(1 / self.head_dim) @ k.transpose(-2, -1)
            weights = torch.softmax(weights if mask is None else weights + mask, dim=-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            made = weights @ v
        else:
            made = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        if weights is not None and need_weights:
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            weights = None
        made = self.out_proj(made.transpose(1, 2).flatten(2))
        if not batched:
            return made.squeeze(0), weights
        return made if self.batch_first else made.transpose(0, 1), weights

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, added: int, q: Tensor
    ) -> Tensor | None:
        """The mask added to the products, broadcast to [batch, heads, queries, keys]."""
        parts: list[Tensor] = []
        if attn_mask is not None:
            shape = (-1, self.num_heads, *attn_mask.shape[1:])
            parts.append(attn_mask.reshape(shape) if attn_mask.dim() == 3 else attn_mask)
        if padding is not None:
            parts.append(padding.reshape(-1, 1, 1, padding.shape[-1]))
        if not parts:
            return None
        # True means that a key is not attended to.
        parts = [
            torch.zeros_like(m, dtype=q.dtype).masked_fill(m, -math.inf)
            if m.dtype == torch.bool
            else m.to(q.dtype)
            for m in parts
        ]
        made = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return F.pad(made, (0, added)) if added else made
