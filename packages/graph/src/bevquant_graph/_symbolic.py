"""A forward followed by `torch.fx` on symbols, around the modules that it cannot follow."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Container
from typing import Any

from torch import fx, nn

from ._quiet import quiet
from ._signature import is_sparse_tensor


class _Tracer(fx.Tracer):
    """`torch.fx` with leaves of the caller's; readers of written values read the result."""

    def __init__(
        self,
        unknown: Container[nn.Module],
        is_leaf: Callable[[nn.Module], bool],
        note: Callable[[fx.Node], object] | None,
    ) -> None:
        super().__init__()
        self._unknown, self._is_leaf, self._note = unknown, is_leaf, note
        # Where each node is noted, buffers are nodes too.
        self.proxy_buffer_attributes = note is not None
        self._called: nn.Module | None = None
        self._written: dict[fx.Node, fx.Node] = {}  # value that was changed in place, and result

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether the module, which is called now, is one node."""
        self._called = m
        return m in self._unknown or self._is_leaf(m)

    def create_arg(self, a: Any) -> Any:
        """A sparse tensor that a forward makes of symbols is its features."""
        sparse = not isinstance(a, fx.Proxy) and is_sparse_tensor(a)
        made = super().create_arg(a.features if sparse else a)
        while isinstance(made, fx.Node) and made in self._written:
            made = self._written[made]
        return made

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Record a step; note it, and whether it writes in place."""
        node = super().create_node(kind, target, *args, **kwargs)
        name = str(target) if kind == "call_method" else getattr(target, "__name__", "")
        inplace = node.kwargs.get("inplace") or (name.endswith("_") and name[:2] != "__")
        if kind == "call_module":
            inplace = getattr(self._called, "inplace", False)
        if inplace is True and node.args and isinstance(node.args[0], fx.Node):
            self._written[node.args[0]] = node
        if self._note is not None:
            self._note(node)
        return node


def trace_around(
    root: nn.Module,
    is_leaf: Callable[[nn.Module], bool],
    unknown: dict[nn.Module, Exception],
    note: Callable[[fx.Node], object] | None = None,
) -> fx.Graph | None:
    """Trace the forward of a module; inner modules that cannot be traced become one node each.

    Args:
        root: The module.
        is_leaf: Whether a module is one node.
        unknown: Receives the modules that could not be traced, each with its error.
        note: Takes each node within the call that makes it.

    Returns:
        The graph; None where the error came from the forward of `root` itself, which is in
        `unknown` then.

    Example:
        >>> class Asks(nn.Module):
        ...     def forward(self, x):
        ...         return x if x.sum() > 0 else -x
        >>> unknown = {}
        >>> net = nn.Sequential(nn.ReLU(), Asks())
        >>> graph = trace_around(net, lambda module: isinstance(module, nn.ReLU), unknown)
        >>> [node.target for node in graph.nodes], list(unknown)
        (['input', '0', '1', 'output'], [Asks()])
    """
    inside = set(root.modules())
    while True:
        try:
            with quiet():
                return _Tracer(unknown, is_leaf, note).trace(root)
        except Exception as error:
            frames = [f for f, _ in traceback.walk_tb(error.__traceback__)]
            owners = [f.f_locals.get("self") for f in reversed(frames)]
            modules = [m for m in owners if isinstance(m, nn.Module) and m in inside]
            failed = next((m for m in modules if m not in unknown), root)
            unknown[failed] = error.with_traceback(None)
            if failed is root:
                return None
