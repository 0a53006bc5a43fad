"""Building a quantized module out of a float one, without copying its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TypeVar

from torch import Tensor, nn

__all__ = ["attach_quantizer", "take_over"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_OWN_DICTS = ("_parameters", "_buffers", "_modules")


def take_over(quantized: ModuleT, source: nn.Module) -> ModuleT:
    """Move the state of `source` into the empty instance `quantized`.

    Parameters and buffers are the same objects, so an optimizer made before still trains them.
    Hook tables are the same objects too, so a handle's `remove()` still works. The tables of
    parameters, buffers and children are copied: what is added to the quantized module does not
    appear in the float one.
    """
    quantized.__dict__.update(source.__dict__)
    for name in _OWN_DICTS:
        quantized.__dict__[name] = source.__dict__[name].copy()
    return quantized


def attach_quantizer(module: nn.Module, name: str, quantizer: nn.Module) -> None:
    """Add `quantizer` as a child, on the module's device and in its training mode."""
    quantizer.train(module.training)
    tensor = next(_tensors(module), None)
    if tensor is not None:
        quantizer.to(tensor.device)
    module.add_module(name, quantizer)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())
