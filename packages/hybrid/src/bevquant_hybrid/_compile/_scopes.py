"""Which module of a model computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bevquant_hybrid.runtime._operators import is_integer, is_known

__all__ = ["following", "in_graph"]

# What a graph calls beside the operators of programs.
_NEUTRAL = tuple(
    f"aten::{name}"
    for name in (
        *("Int", "ScalarImplicit", "contiguous", "detach", "flatten", "size", "to", "unflatten"),
        *("view", "zeros_like"),
    )
)


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


def in_graph(module: Any, operator: str, behind: int) -> tuple[str, str]:
    """Return what a traced model calls an operator that was refused, and the path of its module.

    torch splits some calls before they are seen: the graph has ``aten::prelu`` in the place of
    ``aten::_prelu_kernel``. The path is ``""`` where it is not found.

    Args:
        module: Traced.
        operator: As torch's registry names it.
        behind: How many operators of this package are called before.
    """
    calls = 0
    found: list[tuple[str, str]] = []
    for node in module.inlined_graph.nodes():
        kind = node.kind()
        calls += is_integer(kind)
        if calls == behind and kind.startswith("aten::"):
            innermost = str(node.scopeName()).rpartition("/")[2]
            path = innermost.removeprefix("__module.").removeprefix("__module")
            if kind == operator.partition(".")[0]:
                return operator, path
            if not is_known(kind, any_overload=True) and kind not in _NEUTRAL:
                found.append((kind, path))
    return found[0] if found else (operator, "")
