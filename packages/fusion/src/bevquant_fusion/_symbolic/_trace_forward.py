"""A module's own forward as a graph whose leaves are its child modules."""

from __future__ import annotations

from torch import fx, nn

from ._tracer import ForwardTracer


def trace_forward(module: nn.Module) -> fx.Graph:
    """Trace the forward of ``module`` itself; every module it calls stays one ``call_module`` node.

    Sparse tensors are followed too: ``x.features`` is ``call_function getattr``,
    ``x.replace_feature(y)`` is ``call_method replace_feature`` (a module-level helper named
    ``replace_feature``, as in mmdet3d, is one ``call_function`` node of that name),
    ``x.features = y`` is ``call_function setattr`` in its place, ``out += y`` is ``operator.iadd``
    and ``assert`` is ``torch._assert``. Parameters with a default keep the default.
    ``self.training`` passed on as a value stays live. The module is not changed.

    Args:
        module: Any module; its children are not entered.

    Returns:
        A graph that ``rebuild_forward(module, graph)`` accepts. ``node.target`` of a
        ``call_module`` node is the child's path in ``module``.

    Raises:
        UntraceableError: Where a graph would not say the same as the forward: branches on data or
            on ``self.training``, questions about the class of an input, values stored on the
            module, tensors made from nothing, checkpointing, autocast or gradient-mode switches.

    Example:
        >>> import torch
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv = torch.nn.Conv1d(2, 2, 1)
        ...     def forward(self, x):
        ...         return self.conv(x) + x
        >>> [node.op for node in trace_forward(Block()).nodes]
        ['placeholder', 'call_module', 'call_function', 'output']
    """
    return ForwardTracer().run(module)
