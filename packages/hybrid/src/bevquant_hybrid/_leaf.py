"""Make one node of what tracing cannot or should not look into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.fx import Proxy

__all__ = ["LEAF_MARK", "wrap"]

LEAF_MARK = "_bevquant_hybrid_leaf"  # attribute of classes that are one node

Wrapped = TypeVar("Wrapped", bound=Any)


def wrap(skip_compile: bool = False) -> Callable[[Wrapped], Wrapped]:
    """Decorate a function, a method or a Module class: traced models call it as one node.

    Args:
        skip_compile: Accepted for old scripts.

    Raises:
        TypeError: In the decoration, where the object is none of these.

    Example:
        >>> import torch
        >>> @wrap()
        ... def keep_positive(x):
        ...     return x if x.sum() > 0 else -x
        >>> class Model(nn.Module):
        ...     def forward(self, x):
        ...         return keep_positive(x)
        >>> from bevquant_hybrid.quantization import fuse_fx
        >>> fuse_fx(Model())(torch.tensor([-1.0]))
        tensor([1.])
    """

    def decorate(target: Wrapped) -> Wrapped:
        if isinstance(target, type) and issubclass(target, nn.Module):
            setattr(target, LEAF_MARK, True)
            return target
        if not callable(target):
            raise TypeError(f"wrap: expected a function or a Module class, got {target!r}")
        made: Wrapped = _as_node(target)
        return made

    return decorate


def _as_node(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        proxy = _first_proxy((*args, *kwargs.values()))
        if proxy is None:
            return function(*args, **kwargs)
        return proxy.tracer.create_proxy("call_function", call, args, kwargs)

    return call


def _first_proxy(values: Any) -> Proxy | None:
    for value in values:
        if isinstance(value, Proxy):
            return value
        if isinstance(value, list | tuple):
            found = _first_proxy(value)
            if found is not None:
                return found
    return None
