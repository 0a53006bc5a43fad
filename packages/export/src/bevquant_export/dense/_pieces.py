"""A model whose tensors are cut, as the pieces that are left of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def pieces_of(proto: Any) -> Iterator[Any]:
    """Models of the nodes that hang together, each with what it reads, in the order of their nodes.

    Nodes hang together by tensors that one makes and another reads. Constants join nothing: each
    piece has those that it reads, and the nodes that compute some. A piece that makes no output of
    the graph is left out.
    """
    import onnx

    graph = proto.graph
    held = {tensor.name: tensor for tensor in graph.initializer}
    given = {value.name: value for value in graph.input if value.name not in held}
    wanted = {value.name: value for value in graph.output}
    constant = set(held)
    makers: dict[str, Any] = {}  # of constants
    groups = _Groups()
    rest: list[Any] = []
    for node in graph.node:
        read = _read(node)
        if constant.issuperset(read):
            constant.update(node.output)
            makers.update(dict.fromkeys(node.output, node))
            continue
        groups.join([n for n in (*read, *node.output) if n not in constant and n not in given])
        rest.append(node)
    pieces: dict[str, list[Any]] = {}
    for node in rest:
        pieces.setdefault(groups.of(node.output[0]), []).append(node)
    alone = [[name] for name in wanted if name in constant]
    for nodes in [*pieces.values(), *alone]:
        outputs = [n for node in nodes for n in getattr(node, "output", (node,)) if n in wanted]
        if not outputs:
            continue
        own = [node for node in nodes if not isinstance(node, str)]
        reads = dict.fromkeys(n for node in own for n in _read(node))
        before, tensors = _constants([*reads, *outputs], makers, held)
        piece = onnx.ModelProto(ir_version=proto.ir_version, producer_name=proto.producer_name)
        piece.opset_import.extend(proto.opset_import)
        piece.functions.extend(proto.functions)
        piece.metadata_props.extend(proto.metadata_props)
        piece.graph.name = graph.name
        piece.graph.node.extend([*before, *own])
        piece.graph.initializer.extend(held[name] for name in tensors)
        piece.graph.input.extend(given[name] for name in reads if name in given)
        piece.graph.output.extend(wanted[name] for name in outputs)
        yield piece


class _Groups:
    """Names that belong together (a disjoint-set forest)."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The name that stands for all of its group."""
        while (above := self._above.setdefault(name, name)) != name:
            self._above[name] = name = self._above[above]
        return name

    def join(self, names: list[str]) -> None:
        for name in names[1:]:
            self._above[self.of(name)] = self.of(names[0])


def _read(node: Any) -> list[str]:
    """What a node reads, the graphs inside of it too."""
    read = [name for name in node.input if name]
    for attribute in node.attribute:
        for inner in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
            own = {v.name for v in (*inner.input, *inner.initializer)}
            own |= {name for n in inner.node for name in n.output}
            outer = [name for n in inner.node for name in _read(n)]
            outer += [value.name for value in inner.output]
            read += [name for name in outer if name not in own]
    return read


def _constants(
    names: list[str], makers: dict[str, Any], held: dict[str, Any]
) -> tuple[list[Any], list[str]]:
    """The nodes that compute these constants, each behind those that it reads, and the tensors."""
    nodes: list[Any] = []
    tensors: dict[str, None] = {}
    seen: set[str] = set()
    pending = [(name, False) for name in reversed(names)]
    while pending:
        name, is_read = pending.pop()
        if name in held:
            tensors[name] = None
        elif name in makers and is_read:
            nodes.append(makers[name])
        elif name in makers and name not in seen:
            seen.update(makers[name].output)
            pending.append((name, True))
            pending += [(n, False) for n in _read(makers[name])]
    return nodes, list(tensors)
