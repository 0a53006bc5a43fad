"""How large a quantized model's parameters are, beside float32."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from bevquant_graph import check_kind
from bevquant_quantizers import TensorQuantizer, format_of

MIB = 2**20


@dataclass(frozen=True)
class WeightSize:
    """Size of a model's parameters.

    Attributes:
        before: Bytes in float32, batch norms folded.
        after: Bytes with each quantized weight at its own bit width and the rest in float32.
    """

    before: int
    after: int

    @property
    def texts(self) -> tuple[str, str]:
        """Both sizes in words: MiB, below half of one KiB."""
        before, after = (
            f"{size / MIB:.1f} MiB" if size >= MIB / 2 else f"{size / 2**10:.1f} KiB"
            for size in (self.before, self.after)
        )
        return before, after

    def __str__(self) -> str:
        """As `3.9 MiB float32, 1.2 MiB quantized (3.3 times smaller)`."""
        before, after = self.texts
        times = self.before / max(self.after, 1)
        return f"{before} float32, {after} quantized ({times:.1f} times smaller)"


def weight_size(model: nn.Module) -> WeightSize:
    """Bytes of a quantized model's parameters: Σ 4·n, and Σ n·bits/8 over quantized weights.

    Args:
        model: From `quantize_model`; disabled weight quantizers count as float32.

    Example:
        >>> import torch
        >>> from bevquant_qnn import quantize_model, weight_size
        >>> quantized = quantize_model(torch.nn.Linear(1024, 1024, bias=False)).model
        >>> print(weight_size(quantized))
        4.0 MiB float32, 1.0 MiB quantized (4.0 times smaller)
    """
    check_kind(model, nn.Module, "a torch module")
    bits = {}
    for module in model.modules():
        quantizer = getattr(module, "_weight_quantizer", None)
        if isinstance(quantizer, TensorQuantizer) and not quantizer._disabled:
            form = format_of(quantizer.num_bits)
            bits[id(module.weight)] = form.bits + (8 / form.block if form.block else 0)
    parameters = list(model.parameters())
    before = sum(4 * one.numel() for one in parameters)
    after = sum(int(one.numel() * bits.get(id(one), 32) // 8) for one in parameters)
    return WeightSize(before, after)
