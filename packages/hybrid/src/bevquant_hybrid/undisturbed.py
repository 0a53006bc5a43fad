"""Inspect a running model without changing it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import FakeQuantizeBase

from bevquant_graph import as_example, check_kind, evaluation

__all__ = ["positional", "undisturbed", "unobserved"]


@contextlib.contextmanager
def unobserved(model: nn.Module) -> Iterator[None]:
    """Switch observers off, then restore their states."""
    check_kind(model, nn.Module, "a torch module")
    found = [module for module in model.modules() if isinstance(module, FakeQuantizeBase)]
    before = [bool(module.observer_enabled[0]) for module in found]
    try:
        for fake_quant in found:
            fake_quant.enable_observer(False)
        yield
    finally:
        for fake_quant, enabled in zip(found, before, strict=True):
            fake_quant.enable_observer(enabled)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients and observers; the previous state is restored."""
    with evaluation(model), unobserved(model), torch.no_grad():
        yield


def positional(model: nn.Module, inputs: Any) -> tuple[Any, ...]:
    """A forward's arguments in their order, from example inputs or a loader's batch.

    A tuple or list has the arguments, or an image and its label; a dict has them by name, or is the
    only one (`bevquant_graph.as_example`).

    Raises:
        TypeError: An argument is missing, or can only be given by name.

    Example:
        >>> image, label = torch.ones(1, 2), torch.tensor([3])
        >>> batches = image, [image, label], {"input": image}
        >>> [len(positional(nn.Flatten(), batch)) for batch in batches]
        [1, 1, 1]
    """
    given = as_example(model, tuple(inputs) if isinstance(inputs, list) else inputs)
    if isinstance(given, tuple):
        return given
    bound = inspect.signature(model.forward).bind(**given)
    if bound.kwargs:
        raise TypeError(
            f"{type(model).__name__}.forward takes {', '.join(bound.kwargs)} by name alone; wrap "
            "it in a module with positional arguments"
        )
    bound.apply_defaults()
    return bound.args
