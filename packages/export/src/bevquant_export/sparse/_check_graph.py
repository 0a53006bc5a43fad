"""Checks of a file's graph: conditions between nodes, ranges, names and constants."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bevquant_export.sparse._graph import Add, Conv, Graph, Node, Pool, Relu


def check_graph(graph: Graph) -> None:
    """Check order, channels, ranges, and that each ReLU follows an addition."""
    made: dict[str, Node] = {}
    names: set[str] = set()
    for node in graph.nodes:
        if node.name in names:
            raise ValueError(
                f"two nodes are called {node.name}; a file's reader needs one name each"
            )
        names.add(node.name)
        for name in node.inputs:
            if name != graph.input and name not in made:
                raise ValueError(f"{node.name} reads {name!r}, which nothing before it makes")
        if node.y in made or node.y == graph.input:
            raise ValueError(f"{node.name} makes {node.y!r}, which is there already")
        if isinstance(node, Relu) and not isinstance(made.get(node.x), Add):
            raise ValueError(
                f"{node.name}: a Relu behind something else than an Add; a convolution says "
                "activation='ReLU'"
            )
        if isinstance(node, Conv):
            _check_conv(node)
        if isinstance(node, Add) and node.precision == "int8":
            if node.range_x is None or node.range_other is None:
                raise ValueError(f"{node.name}: precision int8 without both input ranges")
        made[node.y] = node
    for name in graph.outputs:
        if name not in made:
            raise ValueError(f"the output {name!r} is made by no node")
    _check_channels(graph)


def _check_conv(node: Conv) -> None:
    if node.precision == "int8" and node.input_range is None:
        raise ValueError(f"{node.name}: precision int8 without input_dynamic_range")
    ranges = node.weight_ranges
    if ranges is None:
        if node.precision == "int8":
            raise ValueError(f"{node.name}: precision int8 without weight_dynamic_ranges")
        return
    if len(ranges) != node.out_channels or not all(0 < r < math.inf for r in ranges):
        raise ValueError(
            f"{node.name}: {len(ranges)} weight_dynamic_ranges for {node.out_channels} output "
            "channels; expected one positive number for each"
        )


def _check_channels(graph: Graph) -> None:
    channels = {graph.input: graph.channels}
    for node in graph.nodes:
        if node.on_voxels:
            channels[node.y] = node.channels_made([channels.get(name, 0) for name in node.inputs])


def check_rulebooks(graph: Graph) -> None:
    """Refuse a key of convolutions with different pairs, and an inverse one without a partner."""
    # The engine builds the pairs of a key once, for the first convolution that has it.
    first: dict[str, Conv | Pool] = {}
    for node in graph.nodes:
        if not isinstance(node, Conv | Pool):
            continue
        known = first.get(node.rulebook) if node.rulebook else None
        if isinstance(node, Conv) and node.inverse:
            _check_inverse(node, known)
        elif known is None:
            first[node.rulebook] = node
        elif _pairs(known) != _pairs(node):
            raise ValueError(
                f"export_sparse_onnx: {known.path} and {node.path} share the indice_key "
                f"{node.rulebook!r} but differ in kernel, stride, padding, dilation, kind, grid or "
                "voxels; the engine would use the first one's pairs for both: give one of them "
                "another indice_key"
            )


def _pairs(conv: Conv | Pool) -> tuple[object, ...]:
    """Parameters that determine the pairs; padding of a submanifold convolution is not used."""
    moved = None if conv.subm else (conv.stride, conv.padding)
    rows = conv.rows if isinstance(conv, Conv) else ()
    sizes = (conv.input_spatial_shape, conv.output_spatial_shape, rows)
    return (conv.kernel_size, conv.dilation, conv.subm, moved, sizes)


def _check_inverse(conv: Conv, partner: Conv | Pool | None) -> None:
    if partner is None or partner.subm or partner.kernel_size != conv.kernel_size:
        raise ValueError(
            f"export_sparse_onnx: {conv.path} is an inverse convolution under "
            f"indice_key={conv.rulebook!r}, and no strided convolution of kernel size "
            f"{conv.kernel_size} before it has that key"
        )


def tensor_ranges(graph: Graph) -> Mapping[str, float]:
    """Return amax of every int8 tensor, on which its int8 consumers must agree."""
    stated: dict[str, dict[str, float]] = {}
    for node in graph.nodes:
        for name, amax in node.stated_ranges.items():
            stated.setdefault(name, {})[node.name] = amax
    behind = {node.x: node.y for node in graph.nodes if isinstance(node, Relu)}
    found: dict[str, float] = {}
    for node in graph.nodes:
        if not node.makes_int8:
            continue
        tensor = behind.get(node.y, node.y)
        readers = stated.get(tensor, {})
        if len(set(readers.values())) != 1:
            what = ", ".join(f"{name} {amax:g}" for name, amax in readers.items())
            raise ValueError(
                f"{node.name} makes int8, and its readers say "
                f"{'these ranges: ' + what if readers else 'no range'}; expected one. Run the file "
                'with mode="float", or export it again with one quantizer per tensor'
            )
        found[tensor] = found[node.y] = next(iter(readers.values()))
    return found


def numbered(graph: Graph, outputs: Mapping[str, str] | None = None) -> Graph:
    """Tensors "0", "1", … in order of execution; nodes ``conv0``, ``add0``, ``relu0`` and so on.

    `outputs` has other names, for tensors that the file returns.
    """
    names = {graph.input: "0"}
    counts: Counter[str] = Counter()
    nodes: list[Node] = []
    for node in graph.nodes:
        names[node.y] = (outputs or {}).get(node.y, str(len(names)))
        nodes.append(_renamed(node, names, f"{node.kind}{counts[node.kind]}"))
        counts[node.kind] += 1
    return replace(
        graph,
        input="0",
        nodes=tuple(nodes),
        outputs=tuple(names[name] for name in graph.outputs),
        shapes={names[name]: shape for name, shape in graph.shapes.items()},
    )


def _renamed(node: Node, names: Mapping[str, str], name: str) -> Node:
    """The node with another name, its tensors with those in `names`."""
    held: dict[str, Any] = {field: getattr(node, field) for field in node.reads}
    read: dict[str, Any] = {
        field: names[x] if isinstance(x, str) else tuple(map(names.__getitem__, x))
        for field, x in held.items()
    }
    return replace(node, y=names[node.y], name=name, **read)
