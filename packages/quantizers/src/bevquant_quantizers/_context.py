"""Switch quantization off or on for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ._select import select

__all__ = ["quantization_disabled", "quantization_enabled"]


@contextmanager
def quantization_disabled(model: nn.Module, *patterns: str) -> Iterator[None]:
    """Run a block with quantizers that return their inputs: the float model.

    On leaving, by an exception too, each quantizer gets back its own state: one that was off stays
    off. Blocks nest.

    Args:
        model: Any module.
        *patterns: Paths as `select` takes them; none means every quantizer.

    Raises:
        ValueError: A pattern that reaches no quantizer.

    Examples:
        >>> import torch
        >>> from bevquant_quantizers import TensorQuantizer
        >>> quantizer = TensorQuantizer()
        >>> with quantization_disabled(quantizer):
        ...     quantizer(torch.tensor([0.1, 1.0]))
        tensor([0.1000, 1.0000])
    """
    with _switched(model, patterns, on=False):
        yield


@contextmanager
def quantization_enabled(model: nn.Module, *patterns: str) -> Iterator[None]:
    """Run a block with quantizers that quantize, those that are off included.

    On leaving, by an exception too, each quantizer gets back its own state. Blocks nest.

    Args:
        model: Any module.
        *patterns: Paths as `select` takes them; none means every quantizer.

    Raises:
        ValueError: A pattern that reaches no quantizer.

    Examples:
        >>> import torch
        >>> from bevquant_quantizers import QuantDescriptor, TensorQuantizer
        >>> quantizer = TensorQuantizer(QuantDescriptor(amax=127.0), disabled=True)
        >>> with quantization_enabled(quantizer):
        ...     quantizer(torch.tensor([1.4]))
        tensor([1.])
        >>> quantizer(torch.tensor([1.4]))
        tensor([1.4000])
    """
    with _switched(model, patterns, on=True):
        yield


@contextmanager
def _switched(model: nn.Module, patterns: tuple[str, ...], *, on: bool) -> Iterator[None]:
    saved = [
        (entry.quantizer, entry.quantizer._disabled, entry.quantizer._if_quant)
        for entry in select(model, *patterns)
    ]
    try:
        for quantizer, _, if_quant in saved:
            quantizer._disabled = not on
            quantizer._if_quant = on or if_quant
        yield
    finally:
        for quantizer, disabled, if_quant in saved:
            quantizer._disabled, quantizer._if_quant = disabled, if_quant
