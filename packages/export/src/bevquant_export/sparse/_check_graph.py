"""What must hold between the nodes of a file before it can run."""

from __future__ import annotations

import math

from bevquant_export.sparse._graph import Add, Conv, Graph, Node, Relu

__all__ = ["check_graph"]


def check_graph(graph: Graph) -> None:
    """Check order, channels, ranges and that a ReLU only follows an addition.

    Raises:
        ValueError: The node is named.
    """
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
        made = node.channels_made([channels.get(name, 0) for name in node.inputs])
        if made is not None:
            channels[node.y] = made
