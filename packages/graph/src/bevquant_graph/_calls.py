"""A run seen call by call: functions of torch in a forward, nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.overrides import TorchFunctionMode


class FunctionCalls(TorchFunctionMode):
    """Context in which each call of a torch function goes to `handle`.

    Args:
        handle: Takes the function, its positional and its named arguments; returns the result.

    Example:
        >>> import torch
        >>> names = []
        >>> def note(function, args, kwargs):
        ...     names.append(function.__name__)
        ...     return function(*args, **kwargs)
        >>> with FunctionCalls(note):
        ...     y = torch.ones(2).relu()
        >>> names
        ['ones', 'relu']
    """

    def __init__(self, handle: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._handle(func, args, kwargs or {})


class Followed(fx.Interpreter):
    """Runs a graph and reports every node.

    Args:
        model: Holds the graph's modules and tensors.
        see: Takes a node, its arguments (positional and named) and its result.
        graph: The graph; by default `model`'s.
        begin: Takes a node before it runs.

    Attributes:
        node: Name of the node that runs.
    """

    node = ""

    def __init__(
        self,
        model: Any,
        see: Callable[[fx.Node, Any, Any], object] | None = None,
        graph: fx.Graph | None = None,
        *,
        begin: Callable[[fx.Node], object] | None = None,
    ) -> None:
        super().__init__(model, graph=graph)
        self.extra_traceback = False  # messages name files and lines themselves
        self._see, self._begin = see, begin

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        self.node = n.name
        if self._begin is not None:
            self._begin(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = getattr(self, n.op)(n.target, args, kwargs)
        if self._see is not None:
            self._see(n, (args, kwargs), result)
        return result
