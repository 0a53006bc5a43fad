"""Coordinates of a file: number and order of the columns, and the bound of voxels.

Grids of one or two axes get one cell along each missing axis.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bevquant_export.sparse._graph import Conv, Graph, LayoutOp, Node, Pool, Scatter, Steps
from bevquant_export.voxels._window import AXES
from bevquant_int8sim.model import Coords

_OTHER = {"xyz": "zyx", "zyx": "xyz"}
_TURN = (0, 1, 4, 3, 2)


def three_axes(sizes: tuple[int, ...], fill: int, order: str) -> tuple[int, ...]:
    """Sizes per axis with `fill` for the missing height: first in z, y, x, last in x, y, z.

    >>> three_axes((128, 96), 1, "zyx"), three_axes((96, 128), 1, "xyz")
    ((1, 128, 96), (96, 128, 1))
    """
    missing = (fill,) * (AXES - len(sizes))
    return (*missing, *sizes) if order == "zyx" else (*sizes, *missing)


def with_three_axes(coords: Tensor, grid: tuple[int, ...]) -> Tensor:
    """A model's coordinates ``[rows, 1 + ndim]`` in the columns of a file with that grid."""
    missing = AXES + 1 - coords.shape[1]
    if missing <= 0:
        return coords
    zeros = coords.new_zeros(len(coords), missing)
    parts = [coords[:, :1], zeros, coords[:, 1:]] if _first(grid, missing) else [coords, zeros]
    return torch.cat(parts, 1)


def lowered_to(columns: int, coords: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Inverse of `with_three_axes`: a file's coordinates as `columns` of the model."""
    missing = coords.shape[1] - columns
    if missing <= 0:
        return coords
    if _first(grid, missing):
        return torch.cat([coords[:, :1], coords[:, 1 + missing :]], 1)
    return coords[:, :columns]


def _first(grid: tuple[int, ...], missing: int) -> bool:
    return all(size == 1 for size in grid[:missing])


def turned(graph: Graph) -> Graph:
    """Return `graph` for reversed coordinate columns, with the same dense result.

    Kernels and all sizes per axis are reversed. The first transposition after a `Scatter` restores
    the axes; it is added if absent.
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
                nodes.append(LayoutOp(path=node.path, op="Transpose", x=own, y=node.y, dims=_TURN))
        elif isinstance(node, LayoutOp) and node.x in back:
            nodes.append(replace(node, dims=tuple(_TURN[dim] for dim in node.dims)))
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _transposes(node: Node) -> bool:
    return isinstance(node, LayoutOp) and node.op == "Transpose" and len(node.dims) == len(_TURN)


def _turned_conv(node: Conv) -> Conv:
    weight = node.weight.permute(0, 3, 2, 1, 4).contiguous()
    padding = node.output_padding[::-1]
    return replace(node, weight=weight, output_padding=padding, **_turned_sizes(node))


def _turned_sizes(node: Conv | Pool) -> dict[str, Any]:
    sizes = "kernel_size stride padding dilation input_spatial_shape output_spatial_shape"
    return {name: getattr(node, name)[::-1] for name in sizes.split()}


def refuse_more(coords: Coords, conv: Conv) -> None:
    """Refuse a frame with more voxels than the bound of a convolution's output."""
    frames = torch.bincount(coords.indices[:, 0].long())
    most = int(frames.max()) if len(frames) else 0
    if most > conv.output_bound:
        raise ValueError(
            f"{conv.name}: a frame has {most} output voxels, and the file's output_bound is "
            f"{conv.output_bound}: the engine would drop the rest; export with batches that hold "
            "such frames, or with more head_room"
        )
