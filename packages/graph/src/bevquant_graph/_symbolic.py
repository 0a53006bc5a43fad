"""A forward followed by `torch.fx` on symbols, around the modules that it cannot follow."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Container

from torch import fx, nn

from ._quiet import quiet


def trace_around(
    root: nn.Module,
    tracer: Callable[[Container[nn.Module]], fx.Tracer],
    unknown: dict[nn.Module, Exception],
) -> fx.Graph | None:
    """Trace the forward of a module; inner modules that cannot be traced become one node each.

    Args:
        root: The module.
        tracer: Makes a tracer that treats modules of a container as one node each.
        unknown: Receives the modules that could not be traced, each with its error.

    Returns:
        The graph; None where the error came from the forward of `root` itself, which is in
        `unknown` then.

    Example:
        >>> class Asks(nn.Module):
        ...     def forward(self, x):
        ...         return x if x.sum() > 0 else -x
        >>> class Tracer(fx.Tracer):
        ...     def __init__(self, leaves):
        ...         super().__init__()
        ...         self.leaves = leaves
        ...     def is_leaf_module(self, m, path):
        ...         return m in self.leaves or super().is_leaf_module(m, path)
        >>> unknown = {}
        >>> graph = trace_around(nn.Sequential(nn.ReLU(), Asks()), Tracer, unknown)
        >>> [node.target for node in graph.nodes], list(unknown)
        (['input', '0', '1', 'output'], [Asks()])
    """
    inside = set(root.modules())
    while True:
        try:
            with quiet():
                return tracer(unknown).trace(root)
        except Exception as error:
            frames = [f for f, _ in traceback.walk_tb(error.__traceback__)]
            owners = [f.f_locals.get("self") for f in reversed(frames)]
            modules = [m for m in owners if isinstance(m, nn.Module) and m in inside]
            failed = next((m for m in modules if m not in unknown), root)
            unknown[failed] = error.with_traceback(None)
            if failed is root:
                return None
