"""Windows that slide over a grid: sizes that no runtime can walk."""

from __future__ import annotations

from collections.abc import Iterator

from bevquant_export.lint._graph import Graph, Node
from bevquant_export.lint._rule import Finding, Rule

__all__ = ["WINDOWS", "check_windows"]

WINDOWS = Rule(
    "ONX018",
    "error",
    "windows have sizes, strides, dilations and groups from 1, pads from 0, their weight's kernel",
    "write the numbers of the layer that the node stands for",
)
_WEIGHTED = {"Conv": 1, "ConvTranspose": 1, "ConvInteger": 1, "QLinearConv": 3}
_POOLS = ("MaxPool", "AveragePool", "LpPool")
_LEAST = {"kernel_shape": 1, "strides": 1, "dilations": 1, "pads": 0}
_MOST = 2**31 - 1


def check_windows(graph: Graph) -> Iterator[Finding]:
    """Check attributes of convolutions and pooling of the standard operators."""
    for node in graph.nodes:
        if node.domain or (node.op not in _WEIGHTED and node.op not in _POOLS):
            continue
        wrong = next(_wrong(node), None) or _of_weight(graph, node)
        if wrong is not None:
            yield WINDOWS.found(node.name, wrong)


def _wrong(node: Node) -> Iterator[str]:
    for name, least in _LEAST.items():
        for value in node.integers(name):
            if not least <= value <= _MOST:
                yield f"{name} has {value}"
    if node.op in _WEIGHTED and not 1 <= node.integer("group", 1) <= _MOST:
        yield f"group is {node.integer('group', 1)}"


def _of_weight(graph: Graph, node: Node) -> str | None:
    if node.op not in _WEIGHTED:
        return None
    weight = graph.constant(node.input(_WEIGHTED[node.op]))
    if weight is None or len(weight.dims) < 3:
        return None
    shape, kernel = list(weight.dims), node.integers("kernel_shape")
    if kernel and kernel != shape[2:]:
        return f"kernel_shape {kernel}, but its weight's kernel is {shape[2:]}"
    # A transposed convolution's weight starts with the input channels.
    if shape[0] % node.integer("group", 1):
        return f"its {shape[0]} channels are not a multiple of group {node.integer('group', 1)}"
    return None
