"""Calls that tracing records as one node."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.fx import Proxy, _symbolic_trace

from bevquant_graph import leaves

LEAF_MARK = "_bevquant_hybrid_leaf"  # attribute of classes that are one node

Wrapped = TypeVar("Wrapped", bound=Any)


def wrap(skip_compile: bool = False) -> Callable[[Wrapped], Wrapped]:
    """Decorate a function, a method or a Module class, so that tracing records it as one node.

    A string names a function of the calling module (at its top level), such as a builtin. Modules
    that a method calls are prepared and converted as usual.

    Args:
        skip_compile: Accepted for old scripts.

    Raises:
        TypeError: At decoration: the object is none of these.

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
        if isinstance(target, str):
            # `torch.fx.wrap` would take this module for the one that calls the function.
            frame = inspect.currentframe()
            assert frame is not None
            assert frame.f_back is not None
            names = frame.f_back.f_globals
            _symbolic_trace._wrapped_fns_to_patch[(id(names), target)] = names
            return target
        if isinstance(target, type) and issubclass(target, nn.Module):
            setattr(target, LEAF_MARK, True)
            return target
        if not callable(target):
            raise TypeError(f"wrap: expected a function, a Module class or a name, got {target!r}")
        made: Wrapped = _as_node(target)
        return made

    return decorate


def _as_node(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        proxy = next((v for v in leaves((args, kwargs)) if isinstance(v, Proxy)), None)
        if proxy is None:
            return function(*args, **kwargs)
        if args and isinstance(args[0], nn.Module):
            return _call_of_method(function, args[0], proxy.tracer, args[1:], kwargs)
        return proxy.tracer.create_proxy("call_function", call, args, kwargs)

    return call


def _call_of_method(
    function: Any, owner: nn.Module, tracer: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    path = tracer.path_of_module(owner)
    name = f"{path.replace('.', '_')}_wrapped_{function.__name__}"
    if name not in tracer.methods:
        tracer.methods[name] = MethodCall(function, path)
    return tracer.create_proxy("call_module", name, args, kwargs)


class MethodCall(nn.Module):
    """A wrapped method as a module of the traced model."""

    def __init__(self, function: Any, owner_path: str) -> None:
        super().__init__()
        self.function = function
        self.owner_path = owner_path
        self._root: weakref.ref[nn.Module] | None = None

    def of(self, root: nn.Module) -> MethodCall:
        """The same method of another model, which the call does not own."""
        made = MethodCall(self.function, self.owner_path)
        made._root = weakref.ref(root)
        return made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        root = self._root() if self._root is not None else None
        if root is None:
            raise RuntimeError(f"{self.function.__qualname__}: the model that calls it is gone")
        return self.function(root.get_submodule(self.owner_path), *args, **kwargs)

    def extra_repr(self) -> str:
        """Print the method."""
        return str(self.function.__qualname__)
