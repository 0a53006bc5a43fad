"""Inspect a running model without changing it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase

__all__ = ["Followed", "positional", "undisturbed", "unobserved"]


@contextlib.contextmanager
def unobserved(model: nn.Module) -> Iterator[None]:
    """Switch observers off, then restore their states."""
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
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with unobserved(model), torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


class Followed(fx.Interpreter):
    """Runs a graph and reports every node, its arguments (positional and named) and its result."""

    def __init__(
        self, model: Any, see: Callable[[fx.Node, Any, Any], None], graph: fx.Graph | None = None
    ) -> None:
        super().__init__(model, graph=graph)
        self.extra_traceback = False
        self._see = see

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = getattr(self, n.op)(n.target, args, kwargs)
        self._see(n, (args, kwargs), result)
        return result


def positional(example_inputs: Any) -> tuple[Any, ...]:
    """A forward's arguments from a tuple or list; any other value is the only argument."""
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs)
    return (example_inputs,)
