"""Which module of a model computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bevquant_hybrid.runtime._operators import is_integer

__all__ = ["following", "scope_in_graph"]


@contextlib.contextmanager
def following(module: nn.Module) -> Iterator[Callable[[], str]]:
    """Follow the calls of modules inside `module`; the result gives the innermost one's path."""
    stack = [""]
    hooks: list[Any] = []

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: stack.append(path)

    def leave(*_: Any) -> None:
        stack.pop()

    if not isinstance(module, torch.jit.ScriptModule):
        for path, part in module.named_modules():
            hooks.append(part.register_forward_pre_hook(enter(path)))
            hooks.append(part.register_forward_hook(leave, always_call=True))
    try:
        yield lambda: stack[-1]
    finally:
        for hook in hooks:
            hook.remove()


def scope_in_graph(module: Any, operator: str, behind: int) -> str:
    """Return the path of the module of a traced model that calls an operator, or ``""``.

    Args:
        module: Traced.
        operator: As torch's registry names it.
        behind: How many operators of this package are called before.
    """
    calls = 0
    for node in module.inlined_graph.nodes():
        calls += is_integer(node.kind())
        if calls == behind and node.kind() == operator.partition(".")[0]:
            innermost = str(node.scopeName()).rpartition("/")[2]
            return innermost.removeprefix("__module.").removeprefix("__module")
    return ""
