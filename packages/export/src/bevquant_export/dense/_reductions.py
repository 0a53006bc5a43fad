"""Products, sums, clamps and normalizations that are called by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bevquant_export.dense._graph import Graph
from bevquant_export.dense._moves import sliced
from bevquant_export.dense._sizes import Sizes
from bevquant_export.dense._source import Step

__all__ = ["NAMED", "softmax"]

Read = Callable[[str], str]


def softmax(graph: Graph, path: str, x: str, axis: int, rank: int) -> str:
    """A Softmax; before operator set 13 it flattens everything behind its axis."""
    axis %= rank
    if graph.profile.opset >= 13 or axis == rank - 1:
        return graph.node("Softmax", path, [x], axis=axis)
    order = list(range(rank))
    order[axis], order[-1] = order[-1], order[axis]
    turned = graph.node("Transpose", path, [x], perm=order)
    made = graph.node("Softmax", path, [turned], axis=rank - 1)
    return graph.node("Transpose", path, [made], perm=order)


def _mean(graph: Graph, step: Step, read: Read, sizes: Sizes) -> str:
    axes, keep = _axes(step, sizes)
    x = read(step.args[0].name)
    return graph.node("ReduceMean", step.path, [x], axes=axes, keepdims=keep)


def _sum(graph: Graph, step: Step, read: Read, sizes: Sizes) -> str:
    axes, keep = _axes(step, sizes)
    x = read(step.args[0].name)
    if graph.profile.opset < 13:
        return graph.node("ReduceSum", step.path, [x], axes=axes, keepdims=keep)
    return graph.node("ReduceSum", step.path, [x, graph.numbers(axes)], keepdims=keep)


def _axes(step: Step, sizes: Sizes) -> tuple[list[int], int]:
    given = {**dict(zip(("x", "dim", "keepdim"), step.args, strict=False)), **step.kwargs}
    rank, dim = len(sizes.of(step.args[0].name)), given.get("dim")
    dims = range(rank) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    return sorted(d % rank for d in dims), int(bool(given.get("keepdim", False)))


def _matmul(graph: Graph, step: Step, read: Read, sizes: Sizes) -> str:
    names = []
    for ref, turned in zip(step.args, ("x_trans", "y_trans"), strict=True):
        name, rank = read(ref.name), len(sizes.of(ref.name))
        if step.kwargs.get(turned):
            order = [*range(rank - 2), rank - 1, rank - 2]
            name = graph.node("Transpose", step.path, [name], perm=order)
        names.append(name)
    return graph.node("MatMul", step.path, names)


def _clamp(graph: Graph, step: Step, read: Read, sizes: Sizes) -> str:
    limits = [
        "" if step.kwargs[key] is None else _number(graph, step.kwargs[key])
        for key in ("min", "max")
    ]
    inputs = [read(step.args[0].name), *limits]
    return graph.node("Clip", step.path, inputs if limits[1] else inputs[:2])


def _glu(graph: Graph, step: Step, read: Read, sizes: Sizes) -> str:
    shape, x = sizes.of(step.args[0].name), read(step.args[0].name)
    axis = int(step.kwargs["dim"]) % len(shape)
    half = shape[axis] // 2
    values = sliced(graph, step.path, x, {axis: (0, half, 1)})
    gates = sliced(graph, step.path, x, {axis: (half, 2 * half, 1)})
    return graph.node("Mul", step.path, [values, graph.node("Sigmoid", step.path, [gates])])


def _guarded_div(graph: Graph, step: Step, read: Read, sizes: Sizes) -> str:
    """Division where x/0 is ±top and 0/0 is 0."""
    path, (x, y) = step.path, (read(ref.name) for ref in step.args)
    top, one = (_number(graph, value) for value in (step.kwargs["top"], 1.0))
    zero = graph.node("Equal", path, [y, _number(graph, 0.0)])
    ratio = graph.node("Div", path, [x, graph.node("Where", path, [zero, one, y])])
    top = graph.node("Mul", path, [graph.node("Sign", path, [x]), top])
    return graph.node("Where", path, [zero, top, ratio])


def _layer_norm(graph: Graph, step: Step, read: Read, sizes: Sizes) -> str:
    """The operators that it consists of: LayerNormalization is of operator set 17."""
    path, x = step.path, read(step.args[0].name)
    axes, _ = _axes(step, sizes)
    reduced: dict[str, Any] = {"axes": axes, "keepdims": 1}
    deviation = graph.node("Sub", path, [x, graph.node("ReduceMean", path, [x], **reduced)])
    square = graph.node("Mul", path, [deviation, deviation])
    variance = graph.node("ReduceMean", path, [square], **reduced)
    epsilon = graph.constant(f"{path}.eps", step.kwargs["eps"])
    spread = graph.node("Sqrt", path, [graph.node("Add", path, [variance, epsilon])])
    made = graph.node("Div", path, [deviation, spread])
    for name, operator in (("weight", "Mul"), ("bias", "Add")):
        if name in step.tensors:
            value = step.tensors[name].detach().float().cpu().numpy()
            made = graph.node(operator, path, [made, graph.constant(f"{path}.{name}", value)])
    return made


def _number(graph: Graph, value: float) -> str:
    return graph.constant(f"float_{value:g}", np.float32(value))


NAMED: dict[str, Callable[[Graph, Step, Read, Sizes], str]] = {
    "clamp": _clamp,
    "glu": _glu,
    "guarded_div": _guarded_div,
    "layer_norm": _layer_norm,
    "matmul": _matmul,
    "mean": _mean,
    "sum": _sum,
}
