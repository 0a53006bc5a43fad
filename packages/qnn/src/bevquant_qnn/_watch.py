"""Seeing, and answering, the calls of a model's modules while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["Calls", "watching"]

Forward = Callable[..., Any]
Calls = Callable[[nn.Module, Forward, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def watching(model: nn.Module, calls: Calls) -> Iterator[None]:
    """Run a block in which `calls(module, forward, args, kwargs)` stands for every forward.

    `forward` is the module's own. The model itself is left alone, and so is what torch scripted.
    For the block each module's class is a subclass of its own, under the same name.
    """
    own = [(module, type(module)) for module in model.modules() if module is not model]
    made: dict[type[Any], type[Any]] = {}
    changed: list[tuple[nn.Module, type[Any]]] = []
    try:
        for module, cls in own:
            try:
                module.__class__ = made.setdefault(cls, _watched(cls, calls))
            except TypeError:
                continue
            changed.append((module, cls))
        yield
    finally:
        for module, cls in changed:
            module.__class__ = cls


def _watched(cls: type[Any], calls: Calls) -> type[Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def inner(*inner_args: Any, **inner_kwargs: Any) -> Any:
            return cls.forward(self, *inner_args, **inner_kwargs)

        return calls(self, inner, args, kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, "forward": forward})
