r"""Concatenations and sums over channels in the operators that libspconv has.

A submanifold convolution of kernel 1×1×1 moves channels from place to place. With weights that
are 0 and 1,

.. math:: \operatorname{cat}(x_1, …, x_n) = \sum_i x_i P_i, \qquad
          \sum_k x[\,\cdot, c K + k] = x F, \quad F[c K + k, c] = 1

where the columns of all :math:`P_i` together hold one 1 each. All terms of a sum of the former but
one are zero, so that nothing is rounded: a weight of 1 is 64 steps of 1/64, and
``round(64·q · (s/64)/s)`` is q in whatever arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from bevquant_export.sparse._graph import (
    Add,
    Concat,
    Conv,
    Fold,
    Graph,
    Node,
    Relu,
    Sizes,
)

__all__ = ["moves_channels", "with_channel_moves"]

_RANGE = 127 / 64  # of weights: 1.0 is 64 steps
_MARK = " (channels)"  # no module path has a space


@dataclass(frozen=True)
class _Voxels:
    """A set of voxels: the node that made it, its grid, and sizes that a file states."""

    maker: str
    grid: Sizes
    bound: int
    rows: int


def moves_channels(node: Node) -> bool:
    """Whether a node is one that `with_channel_moves` wrote, which no layer of a model makes."""
    return node.path.endswith(_MARK)


def with_channel_moves(graph: Graph) -> Graph:
    """`graph` with every `Concat` and `Fold` as convolutions of kernel 1×1×1 and additions.

    Raises:
        ValueError: One stands on the input's voxels and no submanifold convolution does.
    """
    return _Writer(graph).run()


class _Writer:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.channels = {graph.input: graph.channels}
        self.voxels: dict[str, _Voxels] = {}
        self.undone: dict[str, _Voxels] = {}  # rulebook to what its strided convolution reads
        self.keys: dict[str, str] = {}  # maker of voxels to the rulebook of the moves on them
        self.used = {node.rulebook for node in graph.nodes if isinstance(node, Conv)}
        for node in graph.nodes:
            if isinstance(node, Conv) and node.x == graph.input and node.subm:
                grid, rows = node.input_spatial_shape, node.rows[0]
                self.voxels[graph.input] = _Voxels(graph.input, grid, node.output_bound, rows)
                break

    def run(self) -> Graph:
        nodes: list[Node] = []
        for node in self.graph.nodes:
            if isinstance(node, Concat):
                nodes += self._concatenation(node)
            elif isinstance(node, Fold):
                nodes.append(self._folded(node))
            else:
                nodes.append(node)
            self._note(node)
        return replace(self.graph, nodes=tuple(nodes))

    def _note(self, node: Node) -> None:
        """Channels and voxels of what a node makes."""
        if isinstance(node, Conv):
            self.channels[node.y] = node.out_channels
            before = self.voxels.get(node.x)
            made = _Voxels(node.y, node.output_spatial_shape, node.output_bound, node.rows[1])
            if node.subm:
                made = before or made
            elif node.inverse:
                made = self.undone.get(node.rulebook, made)
            elif node.rulebook:
                own = _Voxels(node.x, node.input_spatial_shape, node.output_bound, node.rows[0])
                self.undone[node.rulebook] = before or own
            self.voxels[node.y] = made
        elif isinstance(node, Add | Relu | Concat | Fold):
            first = node.xs[0] if isinstance(node, Concat) else node.x
            self.channels[node.y] = self.channels[first]
            if isinstance(node, Concat):
                self.channels[node.y] = sum(self.channels[x] for x in node.xs)
            elif isinstance(node, Fold):
                self.channels[node.y] = node.channels
            if first in self.voxels:
                self.voxels[node.y] = self.voxels[first]

    def _concatenation(self, node: Concat) -> Iterator[Node]:
        widths = [self.channels[x] for x in node.xs]
        total, first, summed = sum(widths), 0, ""
        for number, (x, width) in enumerate(zip(node.xs, widths, strict=True)):
            places = torch.zeros(total, width)
            places[first + torch.arange(width), torch.arange(width)] = 1
            first += width
            alone = len(node.xs) == 1
            made = node.y if alone else f"{node.y} part {number}"
            held = node.output_precision if alone else node.precision
            yield self._move(node, x, made, places, held)
            if number:
                last = number == len(node.xs) - 1
                y = node.y if last else f"{node.y} sum {number}"
                yield Add(
                    path=node.path + _MARK, x=summed, other=made, y=y, precision=node.precision,
                    output_precision=node.output_precision if last else node.precision,
                    range_x=node.input_range, range_other=node.input_range,
                )  # fmt: skip
                made = y
            summed = made

    def _folded(self, node: Fold) -> Conv:
        width = self.channels[node.x]
        places = torch.zeros(node.channels, width)
        places[torch.arange(width) // (width // node.channels), torch.arange(width)] = 1
        return self._move(node, node.x, node.y, places, node.output_precision)

    def _move(self, node: Concat | Fold, x: str, y: str, places: Tensor, held: str) -> Conv:
        """``y = x placesᵀ``; ``places`` is ``[out_channels, in_channels]``."""
        voxels = self.voxels.get(x)
        if voxels is None:
            raise ValueError(
                f"export_sparse_onnx: {node.path or 'a concatenation'} joins the input features, "
                "which no submanifold convolution reads, so that the engine could not be told "
                "how many voxels there are; write the file for ONNX Runtime (dialect='portable')"
            )
        amax = node.input_range if isinstance(node, Concat) else None
        out_channels, in_channels = places.shape
        one, nothing = (1, 1, 1), (0, 0, 0)
        return Conv(
            path=node.path + _MARK, x=x, y=y,
            weight=places.reshape(out_channels, *one, in_channels).half(),
            bias=torch.zeros(out_channels, dtype=torch.float16),
            kernel_size=one, stride=one, padding=nothing, dilation=one, output_padding=nothing,
            subm=True, inverse=False, rulebook=self._key(voxels.maker), activation="None",
            precision="fp16" if amax is None else "int8", output_precision=held,
            input_range=amax,
            weight_ranges=(_RANGE,) * out_channels if amax is not None or held == "int8" else None,
            output_bound=voxels.bound, input_spatial_shape=voxels.grid,
            output_spatial_shape=voxels.grid, rows=(voxels.rows, voxels.rows),
        )  # fmt: skip

    def _key(self, maker: str) -> str:
        if maker not in self.keys:
            free = (f"channels{n}" for n in count(1))
            self.keys[maker] = next(key for key in free if key not in self.used)
            self.used.add(self.keys[maker])
        return self.keys[maker]
