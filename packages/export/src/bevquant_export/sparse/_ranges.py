"""Range of every int8 tensor of a file: a file states it only at the consumers."""

from __future__ import annotations

from collections.abc import Mapping

from bevquant_export.sparse._graph import Graph, Relu


def tensor_ranges(graph: Graph) -> Mapping[str, float]:
    """Return amax of every int8 tensor.

    Raises:
        ValueError: An int8 tensor has no int8 consumer, or its consumers disagree; they are named.
    """
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
