"""Quantized products of two activations, as the two of an attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_qnn._descriptors import InputDefault
from bevquant_quantizers import QuantDescriptor, TensorQuantizer

MATMULS = frozenset(
    {torch.matmul, torch.bmm, torch.mm, torch.einsum, Tensor.matmul, Tensor.bmm, Tensor.mm}
    | {Tensor.__matmul__}
)
ATTENTIONS = frozenset({F.scaled_dot_product_attention})


def equation_and_operands(args: Sequence[Any]) -> tuple[str, list[Any]]:
    """Of a call of one of `MATMULS` or its node; the equation is `einsum`'s, else empty."""
    if not args or not isinstance(args[0], str):
        return "", list(args)
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    return equation, operands


def factors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Operands of a call of one of `MATMULS`; None for any but two tensors."""
    _, given = equation_and_operands(args)
    two = len(given) == 2 and not kwargs and all(isinstance(value, Tensor) for value in given)
    return given if two else None


class QuantMatmul(InputDefault, nn.Module):
    """Multiply two activations after fake-quantizing each with a quantizer of its own.

    y = fq(a) @ fq(b), by the rules of `torch.matmul`, or ``einsum(equation, fq(a), fq(b))``.

    Args:
        equation: Of `torch.einsum` for two operands; None for `torch.matmul`.
        quant_desc_input: Descriptor of both quantizers; 8 bit per tensor by default.

    Example:
        >>> import torch
        >>> product = QuantMatmul()
        >>> product.input_quantizer.amax, product.other_quantizer.amax = 127.0, 12.7
        >>> product(torch.tensor([[1.4, 3.0]]), torch.tensor([[2.0], [0.66]]))
        tensor([[4.1000]])
    """

    def __init__(
        self, equation: str | None = None, *, quant_desc_input: QuantDescriptor | None = None
    ) -> None:
        super().__init__()
        self.equation = equation or None
        self._input_quantizer = TensorQuantizer(self._input_descriptor(quant_desc_input))
        self._other_quantizer = TensorQuantizer(self._input_descriptor(quant_desc_input))

    @property
    def other_quantizer(self) -> TensorQuantizer:
        """The quantizer of the second operand."""
        return self._other_quantizer

    @property
    def operand_quantizers(self) -> tuple[TensorQuantizer, ...]:
        """The quantizer of each operand, in the order of the call."""
        return self._input_quantizer, self._other_quantizer

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply `a` and `b`."""
        a, b = self._input_quantizer(a), self._other_quantizer(b)
        return torch.matmul(a, b) if self.equation is None else torch.einsum(self.equation, a, b)

    def depth(self, a: Tensor, b: Tensor) -> int:
        """How many products each value of the result is a sum of."""
        if self.equation is None:
            return int(a.shape[-1])
        terms, _, made = self.equation.replace(" ", "").partition("->")
        sizes: dict[str, int] = {}
        for term, x in zip(terms.split(","), (a, b), strict=True):
            before, _, behind = term.partition("...")
            sizes |= dict(zip(before, x.shape, strict=False))
            sizes |= dict(zip(reversed(behind), reversed(x.shape), strict=False))
        # Without an arrow, what stands once is kept.
        kept = made or {label for label in sizes if terms.count(label) == 1}
        return math.prod(size for label, size in sizes.items() if label not in kept)

    def extra_repr(self) -> str:
        """The equation, where there is one."""
        return "" if self.equation is None else repr(self.equation)


class QuantAttention(nn.Module):
    r"""`torch.nn.functional.scaled_dot_product_attention` with both products quantized.

    .. math:: fq\Bigl(\operatorname{softmax}\bigl(fq(s\,q)\,fq(k)^T + m\bigr)\Bigr)\, fq(v)

    Quantizers stand in front of the first product, behind the softmax and on the values: where
    TensorRT needs them to fuse an int8 attention. The scale s is applied to q, as it asks for.

    Args:
        quant_desc_input: Descriptor of the four quantizers; 8 bit per tensor by default.

    Example:
        >>> import torch
        >>> attention = QuantAttention()
        >>> q = torch.ones(1, 2, 5, 8)
        >>> attention(q, q, q).shape
        torch.Size([1, 2, 5, 8])
    """

    def __init__(self, *, quant_desc_input: QuantDescriptor | None = None) -> None:
        super().__init__()
        self.scores = QuantMatmul(quant_desc_input=quant_desc_input)
        self.values = QuantMatmul(quant_desc_input=quant_desc_input)

    @property
    def operand_quantizers(self) -> tuple[TensorQuantizer, ...]:
        """The quantizers of query, key and value."""
        return *self.scores.operand_quantizers, self.values.other_quantizer

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attend; arguments and result are torch's, ``[…, heads, queries, channels]``."""
        if enable_gqa:
            heads = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(heads, -3) for x in (key, value))
        if is_causal:
            ones = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
            attn_mask = ones.tril()
        return self.attend(query, key, value, attn_mask, dropout_p, scale)[0]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The result, and the weights of the values behind softmax and dropout."""
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = self.scores(query * factor, key.transpose(-2, -1))
        if mask is not None and mask.dtype == torch.bool:
            weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
            weights = weights.masked_fill(~mask, 0)  # also of rows without any key
        else:
            weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        return self.values(weights, value), weights
