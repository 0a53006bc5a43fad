"""Modules that cannot be followed, as one node each.

``bevquant_graph::opaque(tensors, key)`` calls a module as Python runs it. In a graph it stands for
what could not be captured: its inputs and outputs are values, its inside is not known, and the
sizes of its outputs are those of the example.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ._signature import Tree, flatten, rebuild

__all__ = ["OPAQUE", "Opaque", "opaque_call", "opaque_modules", "recorded"]


@dataclass(eq=False)
class Opaque:
    """A module that is one node of a graph.

    Attributes:
        path: The module.
        reason: What could not be followed, with file and line.
        calls: For each call in order: key, tree of the arguments, example outputs, tree of these.
        called: Paths of the modules inside of it that run in these calls, its own among them.
    """

    path: str
    reason: str
    calls: list[_Call] = field(default_factory=list)
    called: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Call:
    key: str
    module: nn.Module
    inputs: Tree
    outputs: list[Tensor]
    result: Tree


_calls: dict[str, _Call] = {}
_numbers = itertools.count()


@torch.library.custom_op("bevquant_graph::opaque", mutates_args=())
def _opaque(tensors: list[Tensor], key: str) -> list[Tensor]:
    call = opaque_call(key)
    args, kwargs = rebuild(call.inputs, tensors)
    made, _ = flatten(call.module(*args, **kwargs))
    # What is handed through must not be the input's own memory.
    return [t.clone() if any(t is given for given in tensors) else t for t in made]


@_opaque.register_fake
def _(tensors: list[Tensor], key: str) -> list[Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in opaque_call(key).outputs]


OPAQUE = torch.ops.bevquant_graph.opaque.default


def opaque_call(key: str) -> _Call:
    """What the node with this key calls.

    Raises:
        ValueError: The graph was made in another process.
    """
    if key not in _calls:
        raise ValueError(
            f"bevquant_graph::opaque: nothing is known under {key!r}; a graph with opaque nodes "
            "lives in the process that captured it: capture the model again"
        )
    return _calls[key]


@contextmanager
def opaque_modules(model: nn.Module, opaque: Mapping[str, Opaque]) -> Iterator[None]:
    """While it is entered, each module at a path of `opaque` is one operator call."""
    closed: list[tuple[nn.Module, Any]] = []
    for path, entry in opaque.items():
        module = model.get_submodule(path)
        calls = iter(entry.calls)

        def forward(*args: Any, calls: Any = calls, **kwargs: Any) -> Any:
            call = next(calls)
            leaves, call.inputs = flatten((args, kwargs))
            return rebuild(call.result, OPAQUE(leaves, call.key))

        closed.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, own in closed:
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


def recorded(model: nn.Module, path: str, reason: str, run: Any) -> Opaque:
    """The module at `path` as one node, its calls recorded in one run of the model."""
    entry = Opaque(path, reason)
    module = model.get_submodule(path)

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        leaves, result = flatten(output)
        call = _Call(
            f"{path}:{next(_numbers)}", module, flatten((args, kwargs))[1],
            [leaf.detach().clone() for leaf in leaves], result,
        )  # fmt: skip
        _calls[call.key] = call
        entry.calls.append(call)

    with ExitStack() as hooks:
        hooks.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        for name, inside in module.named_modules(prefix=path, remove_duplicate=False):
            note = partial(_noted, entry.called, name)
            hooks.callback(inside.register_forward_pre_hook(note).remove)
        run()
    return entry


def _noted(called: set[str], path: str, module: nn.Module, args: Any) -> None:
    called.add(path)
