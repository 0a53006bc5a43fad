"""Look at a model that runs, and leave it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import FakeQuantizeBase

__all__ = ["positional", "undisturbed"]


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, no observing; afterwards everything is as before."""
    modes = {module: module.training for module in model.modules()}
    observing = {
        module: bool(module.observer_enabled[0])
        for module in modes
        if isinstance(module, FakeQuantizeBase)
    }
    try:
        model.eval()
        for fake_quant in observing:
            fake_quant.enable_observer(False)
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        for fake_quant, enabled in observing.items():
            fake_quant.enable_observer(enabled)


def positional(example_inputs: Any) -> tuple[Any, ...]:
    """A forward's arguments: a tuple or list holds them, anything else is the only one."""
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs)
    return (example_inputs,)
