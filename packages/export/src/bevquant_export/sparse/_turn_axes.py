"""The same graph for coordinates in the opposite order: x, y, z for z, y, x."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bevquant_export.sparse._graph import Conv, Graph, Move, Node, Pool, Scatter, Steps

__all__ = ["turned"]

_OTHER = {"xyz": "zyx", "zyx": "xyz"}
_TURN = (0, 1, 4, 3, 2)


def turned(graph: Graph) -> Graph:
    """`graph` for reversed coordinate columns; what it returns as a dense grid is the same.

    Kernels and all sizes per axis are reversed; the first transposition behind a `Scatter` turns
    the axes back, and is added where there is none.
    """
    nodes: list[Node] = []
    back: set[str] = set()
    for node in graph.nodes:
        if isinstance(node, Conv):
            nodes.append(_turned_conv(node))
        elif isinstance(node, Pool):
            nodes.append(replace(node, **_turned_sizes(node)))
        elif isinstance(node, Steps) and (node.places or node.grid):
            raise ValueError(
                f"export_sparse_onnx: {node.path or 'the forward'} computes with coordinates "
                "between its layers, in the model's order: leave out order"
            )
        elif isinstance(node, Scatter):
            turned_node = replace(
                node,
                input_spatial_shape=node.input_spatial_shape[::-1],
                format=_OTHER[node.format],
                output_shape=(*node.output_shape[:2], *node.output_shape[:1:-1]),
            )
            readers = [other for other in graph.nodes if node.y in other.inputs]
            if node.y not in graph.outputs and all(_transposes(other) for other in readers):
                nodes.append(turned_node)
                back.add(node.y)
            else:
                own = f"{node.y} turned"
                nodes.append(replace(turned_node, y=own))
                nodes.append(Move(path=node.path, op="Transpose", x=own, y=node.y, dims=_TURN))
        elif isinstance(node, Move) and node.x in back:
            nodes.append(replace(node, dims=tuple(_TURN[dim] for dim in node.dims)))
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _transposes(node: Node) -> bool:
    return isinstance(node, Move) and node.op == "Transpose" and len(node.dims) == len(_TURN)


def _turned_conv(node: Conv) -> Conv:
    weight = node.weight.permute(0, 3, 2, 1, 4).contiguous()
    padding = node.output_padding[::-1]
    return replace(node, weight=weight, output_padding=padding, **_turned_sizes(node))


def _turned_sizes(node: Conv | Pool) -> dict[str, Any]:
    sizes = "kernel_size stride padding dilation input_spatial_shape output_spatial_shape"
    return {name: getattr(node, name)[::-1] for name in sizes.split()}
