"""Tracing a forward in the form in which the model calls it."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import fx, nn

from bevquant_fusion import trace_forward

__all__ = ["trace_given", "trace_unpacked"]


def trace_given(module: nn.Module, names: Collection[str]) -> fx.Graph:
    """Trace the forward of `module` with some of its optional parameters given.

    The graph is fit for reading, not for replacing the forward: it has no defaults.

    Raises:
        UntraceableError: As `bevquant_fusion.trace_forward`.
    """
    cls = type(module)
    parameters = list(inspect.signature(cls.forward).parameters.values())
    required = [
        p.replace(default=p.empty, kind=p.KEYWORD_ONLY, annotation=p.empty)
        for p in parameters
        if p.name in names
    ]
    optional = [p for p in parameters if p.name not in names]
    # Keyword-only parameters come last, and may be required after optional ones.
    signature = inspect.Signature([*optional, *required])

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    body = {"forward": forward, "__module__": cls.__module__}
    view: nn.Module = object.__new__(type(cls.__name__, (cls,), body))
    view.__dict__ = module.__dict__
    return trace_forward(view)


def trace_unpacked(module: nn.Module, lengths: Mapping[str, int]) -> fx.Graph:
    """Trace the forward of `module` with some parameters as lists of the given lengths.

    The graph takes the lists as the forward does, and refuses lists of another length.

    Raises:
        UntraceableError: As `bevquant_fusion.trace_forward`.
    """
    view = object.__new__(_view_class(type(module), lengths))
    view.__dict__ = module.__dict__
    graph = trace_forward(view)
    for name, length in lengths.items():
        _pack(graph, name, length)
    return graph


def _element(name: str, index: int) -> str:
    return f"{name}__{index}"


def _view_class(cls: type[nn.Module], lengths: Mapping[str, int]) -> type[nn.Module]:
    """Return a subclass whose forward takes the elements one by one."""
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(cls.forward).parameters.values():
        names = [_element(parameter.name, i) for i in range(lengths.get(parameter.name, 0))]
        parameters += [parameter.replace(name=n, annotation=parameter.empty) for n in names]
        if parameter.name not in lengths:
            parameters.append(parameter)
    signature = inspect.Signature(parameters)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        del given[parameters[0].name]
        for name, length in lengths.items():
            given[name] = [given.pop(_element(name, i)) for i in range(length)]
        return cls.forward(self, **given)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _pack(graph: fx.Graph, name: str, length: int) -> None:
    """Replace the placeholders of the elements by one list and its items."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    elements = {str(node.target): node for node in inputs}
    with graph.inserting_before(elements[_element(name, 0)]):
        whole = graph.placeholder(name)
    with graph.inserting_after(inputs[-1]):
        items = graph.call_function(exactly, (whole, length))
    after = items
    for index in range(length):
        old = elements[_element(name, index)]
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (items, index))
        old.replace_all_uses_with(after)
        graph.erase_node(old)


def exactly(items: Sequence[Any], length: int) -> Sequence[Any]:
    """Return `items`, which a rebuilt forward takes in one length only.

    Raises:
        ValueError: If there are more or fewer.
    """
    if len(items) != length:
        msg = (
            f"this forward was rebuilt for a list of {length} tensors, got {len(items)}; quantize "
            "the model with example_inputs of the form it is called with"
        )
        raise ValueError(msg)
    return items
