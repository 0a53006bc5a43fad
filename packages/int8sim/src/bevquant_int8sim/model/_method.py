"""Functions by name: a tensor's method, an operator of torch."""

from __future__ import annotations

from typing import Any

import torch


class Method:
    """Calls the method of its first argument that has this name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, self.__name__)(*args, **kwargs)


def torch_operator(name: str) -> torch._ops.OpOverload | None:
    """The operator ``<library>.<operator>.<overload>`` that torch knows."""
    library, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    known = getattr(getattr(torch.ops, library, None), packet, None)
    found = getattr(known, overload or "default", None)
    return found if isinstance(found, torch._ops.OpOverload) and str(found) == name else None
