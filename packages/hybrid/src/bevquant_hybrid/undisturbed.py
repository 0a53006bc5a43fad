"""Inspect a running model without changing it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase

from bevquant_graph import as_example, check_kind, evaluation

__all__ = ["Followed", "positional", "undisturbed", "unobserved"]


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


class Followed(fx.Interpreter):
    """Runs a graph and reports every node, its arguments (positional and named) and its result.

    Attributes:
        node: Name of the node that runs.
    """

    node = ""

    def __init__(
        self,
        model: Any,
        see: Callable[[fx.Node, Any, Any], None] = lambda *_: None,
        graph: fx.Graph | None = None,
    ) -> None:
        super().__init__(model, graph=graph)
        self.extra_traceback = False
        self._see = see

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        self.node = n.name
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = getattr(self, n.op)(n.target, args, kwargs)
        self._see(n, (args, kwargs), result)
        return result


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
