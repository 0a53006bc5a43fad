"""The place for the nodes of one step, and the call of the function that writes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bevquant_export.dense._source import Source
from bevquant_export.dense.nodes._graph import Graph
from bevquant_int8sim.program import Ref, Step

# TensorProto's numbers of types.
TYPES = {
    torch.float32: 1, torch.uint8: 2, torch.int8: 3, torch.int16: 5, torch.int32: 6,
    torch.int64: 7, torch.bool: 9, torch.float16: 10, torch.float64: 11,
}  # fmt: skip

Read = Callable[[str], str]
Form = Callable[..., Any]
"""Writes an operator with torch's arguments; None where these have no form."""


class At:
    """The place for new nodes, and the values that a step reads, to their float tensors."""

    def __init__(self, graph: Graph, step: Step, read: Read, source: Source) -> None:
        self.graph, self.step, self.source = graph, step, source
        self.path, self._read = step.path, read

    def node(self, operator: str, *inputs: Any, **attributes: Any) -> str:
        """Add a node; numbers, and lists of whole ones, among its inputs are constants."""
        return self.graph.node(operator, self.path, list(map(self.name, inputs)), **attributes)

    def name(self, value: Ref | str | float | Sequence[int]) -> str:
        """Tensor of an operand."""
        if isinstance(value, Ref):
            return self._read(value.name)
        if isinstance(value, list | tuple):
            return self.graph.numbers(value)
        return value if isinstance(value, str) else self.graph.constant(f"float_{value:g}", value)

    def parameter(self, name: str, value: Any) -> str:
        """A constant of the module."""
        value = value.detach().float().cpu().numpy() if isinstance(value, Tensor) else value
        return self.graph.constant(f"{self.path}.{name}", value)

    def parameters(self, **tensors: Tensor | None) -> list[str]:
        """Those that are given."""
        return [self.parameter(name, t) for name, t in tensors.items() if t is not None]

    def sliced(self, name: str, cuts: dict[int, tuple[int, int, int]]) -> str:
        """A Slice with start, end and stride per axis."""
        return sliced(self.graph, self.path, name, cuts)

    def shape(self, x: Ref) -> tuple[int, ...]:
        """Shape in the run of the program."""
        shape: tuple[int, ...] = self.source.shapes[x.name]
        return shape

    def free(self, x: Ref) -> int:
        """Number of free sizes."""
        return sum(isinstance(size, str) for size in self.source.named(x.name))


def written(form: Form, at: At, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Result of a form; None where torch's arguments are others than those that it has."""
    try:
        given = inspect.signature(form).bind(at, *args, **kwargs)
    except TypeError:
        return None
    return form(*given.args, **given.kwargs)


def reshaped(graph: Graph, path: str, name: str, target: list[int]) -> str:
    """A Reshape to these sizes."""
    return graph.node("Reshape", path, [name, graph.numbers(target)])


def sliced(graph: Graph, path: str, x: str, cuts: dict[int, tuple[int, int, int]]) -> str:
    """A Slice with start, end and stride per axis."""
    starts, stops, strides = ([cut[i] for cut in cuts.values()] for i in range(3))
    inputs = [graph.numbers(values) for values in (starts, stops, list(cuts), strides)]
    return graph.node("Slice", path, [x, *inputs])
