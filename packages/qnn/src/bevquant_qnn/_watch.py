"""Seeing, and answering, the calls of a model's modules while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["Forward", "Watch"]

Forward = Callable[..., Any]
Calls = Callable[[nn.Module, Forward, tuple[Any, ...], dict[str, Any]], Any]


class Watch:
    """The modules of a model, but for the model itself and for what torch scripted.

    Args:
        model: Its modules get classes of their own, under the same names, while `seeing` lasts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._calls: Calls | None = None
        made: dict[type[Any], type[Any]] = {}
        self._classes: list[tuple[nn.Module, type[Any], type[Any]]] = []
        for module in model.modules():
            cls = type(module)
            if module is model:
                continue
            if cls not in made:
                made[cls] = self._watched(cls)
            self._classes.append((module, cls, made[cls]))

    @contextmanager
    def seeing(self, calls: Calls) -> Iterator[None]:
        """Run a block in which `calls(module, forward, args, kwargs)` stands for every forward.

        `forward` is the module's own.
        """
        changed = []
        self._calls = calls
        try:
            for module, own, watched in self._classes:
                try:
                    object.__setattr__(module, "__class__", watched)
                except TypeError:
                    continue
                changed.append((module, own))
            yield
        finally:
            for module, own in changed:
                object.__setattr__(module, "__class__", own)

    def _watched(self, cls: type[Any]) -> type[Any]:
        watch = self

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            def own(*inner: Any, **options: Any) -> Any:
                return cls.forward(self, *inner, **options)

            return watch._calls(self, own, args, kwargs)  # type: ignore[misc]

        names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        return type(cls.__name__, (cls,), {**names, "forward": forward})
