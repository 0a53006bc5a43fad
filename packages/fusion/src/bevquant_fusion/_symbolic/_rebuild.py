"""Give a module a new forward, made from a graph, without patching the instance."""

from __future__ import annotations

import copy
import inspect
import linecache
import operator
from collections.abc import Callable
from itertools import count
from typing import Any

from torch import fx, nn

from ._errors import UntraceableError
from ._proxy import INPLACE_OPERATORS

_BASE = "_bevquant_base_class"
_serial = count()


def rebuild_forward(module: nn.Module, graph: fx.Graph) -> None:
    """Make ``graph`` the forward of ``module``, in place.

    The module's class becomes a new subclass of its class with the same ``__name__``,
    ``__qualname__`` and ``__module__``, so ``isinstance``, ``repr``, ``state_dict``, hooks and
    ``copy.deepcopy`` go on as before. Children that the graph no longer calls stay until the
    caller deletes them; children it calls must exist. A rebuilt module can be traced and rebuilt
    again. Parameters of the old forward that had a default and are not placeholders of the graph
    are fixed at that default: a call that passes another value raises ``ValueError``.

    A rebuilt module cannot be pickled whole (its class exists in this process only);
    ``pickle`` and ``torch.save(module)`` raise ``TypeError``. Save its ``state_dict()``.

    Args:
        module: The module to change.
        graph: As made by ``trace_forward(module)``, possibly edited. It is copied.

    Raises:
        UntraceableError: Where the graph calls a child, parameter or buffer the module lacks.

    Example:
        >>> import torch
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv = torch.nn.Conv1d(2, 2, 1)
        ...     def forward(self, x):
        ...         return self.conv(x) + x
        >>> block, x = Block(), torch.ones(1, 2, 3)
        >>> expected = block(x)
        >>> from bevquant_fusion import trace_forward
        >>> rebuild_forward(block, trace_forward(block))
        >>> torch.equal(block(x), expected), type(block).__name__, isinstance(block, Block)
        (True, 'Block', True)
    """
    own = fx.Graph()
    output = own.graph_copy(graph, val_map={}, return_output_node=True)
    own.output(output[0] if isinstance(output, tuple) else output)
    _check_targets(module, own)
    _use_safe_inplace(own)
    base = getattr(type(module), _BASE, type(module))
    compiled = _compile(own, base)
    namespace: dict[str, Any] = {
        _BASE: base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "forward": _with_signature(compiled, base, type(module)),
        "__reduce_ex__": _refuse_pickle,
    }
    if "__deepcopy__" not in _methods(base):
        namespace["__deepcopy__"] = _deepcopy
    if "__copy__" not in _methods(base):
        namespace["__copy__"] = _copy
    module.__class__ = type(base.__name__, (base,), namespace)


def _methods(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in vars(base)}


def _check_targets(module: nn.Module, graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        try:
            operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else (
                module.get_submodule(str(node.target))
            )
        except AttributeError:
            raise UntraceableError(
                f"{type(module).__name__} has no {node.target!r}, which the new forward uses; "
                "add it before rebuilding"
            ) from None


def _use_safe_inplace(graph: fx.Graph) -> None:
    """Call in-place operators as functions.

    fx prints ``operator.iadd`` as ``a += b``, which rebinds the name ``a`` too and so changes
    later readers of an immutable ``a`` (a size, a tuple).
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target in INPLACE_OPERATORS:
            node.target = _SAFE_INPLACE[node.target]


def _safe(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def inplace(a: Any, b: Any) -> Any:
        return function(a, b)

    inplace.__name__ = inplace.__qualname__ = f"inplace_{function.__name__}"
    return inplace


_SAFE_INPLACE = {function: _safe(function) for function in INPLACE_OPERATORS}


def _compile(graph: fx.Graph, base: type) -> Callable[..., Any]:
    code = graph.python_code("self")
    filename = f"<bevquant_fusion forward of {base.__qualname__} #{next(_serial)}>"
    linecache.cache[filename] = (len(code.src), None, code.src.splitlines(True), filename)
    names = dict(code.globals)
    exec(compile(code.src, filename, "exec"), names)  # the source fx printed from our own graph
    forward: Callable[..., Any] = names["forward"]
    return forward


def _with_signature(compiled: Callable[..., Any], base: type, current: type) -> Callable[..., Any]:
    """Let the new forward be called as the old one was."""
    signature = inspect.signature(current.forward)  # type: ignore[attr-defined]
    accepted = list(inspect.signature(compiled).parameters)[1:]
    parameters = list(signature.parameters.values())[1:]
    if [p.name for p in parameters] == accepted:
        compiled.__qualname__ = f"{base.__qualname__}.forward"
        compiled.__module__ = base.__module__
        return compiled

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs).arguments
        given = dict(list(bound.items())[1:])
        for name in list(given):
            if name in accepted:
                continue
            parameter = signature.parameters[name]
            default = parameter.default
            if parameter.kind is parameter.VAR_KEYWORD and not given[name]:
                continue
            if given[name] is not default:
                raise ValueError(
                    f"{base.__name__}.forward was rebuilt for calls without {name!r}; it is fixed "
                    f"at {default!r}"
                )
        return compiled(self, *(given[name] for name in accepted))

    forward.__qualname__ = f"{base.__qualname__}.forward"
    forward.__module__ = base.__module__
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def _refuse_pickle(self: nn.Module, protocol: Any) -> Any:
    raise TypeError(
        f"{type(self).__name__} has a rebuilt forward and cannot be pickled whole; save its "
        "state_dict() and rebuild the model when loading"
    )


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    duplicate: nn.Module = object.__new__(type(self))
    memo[id(self)] = duplicate
    for key, value in vars(self).items():
        vars(duplicate)[key] = copy.deepcopy(value, memo)
    return duplicate


def _copy(self: nn.Module) -> nn.Module:
    duplicate: nn.Module = object.__new__(type(self))
    vars(duplicate).update(vars(self))
    return duplicate
