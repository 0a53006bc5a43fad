"""What a portable model gives away: its results, and its layers where they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bevquant_export.sparse._graph import Node
from bevquant_export.sparse.portable._body import FLOAT, INT8, INT32
from bevquant_export.sparse.portable._emit import Emitter
from bevquant_export.sparse.portable._tensor_state import Integers, TensorState
from bevquant_export.sparse.portable._voxel_sets import VoxelSet

Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class LayerOutput:
    """Where a run shows what a node made.

    Attributes:
        node: The node.
        tensor: Output of the model.
        amax: Range of an int8 tensor; ``None`` for floats.
        coords: Output with the voxels of its rows, or the input ``"coords"``; ``""`` for a dense
            tensor.
        grid: Their spatial shape.
    """

    node: Node
    tensor: str
    amax: float | None
    coords: str
    grid: tuple[int, ...]


class Outputs:
    """Outputs of the model, in the order in which they are asked for.

    Args:
        emitter: Takes the nodes.
    """

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self._coords = {"input": "coords"}

    def layer(
        self, node: Node, state: TensorState, voxel_set: VoxelSet, shape: Shape
    ) -> LayerOutput:
        """What a node on voxels made, under its name: int8 where it is held so, else floats."""
        amax = state.amax if isinstance(state, Integers) else None
        if amax is None:
            self._give(state.floats(), node.name, FLOAT, shape)
        else:
            (made,) = self.emitter.call("Int8", [state.integers(amax)], f"{node.name}.signed")
            self._give(made, node.name, INT8, shape)
        if voxel_set.maker not in self._coords:
            self._coords[voxel_set.maker] = self._voxels(voxel_set, f"{voxel_set.maker}.coords")
        return LayerOutput(node, node.name, amax, self._coords[voxel_set.maker], voxel_set.grid)

    def result(
        self, name: str, node: Node, state: TensorState, voxel_set: VoxelSet | None, shape: Shape
    ) -> LayerOutput:
        """A result of the graph in floats, and its voxels where it is sparse."""
        self._give(state.floats(), name, FLOAT, shape)
        if voxel_set is None:
            return LayerOutput(node, name, None, "", ())
        return LayerOutput(
            node, name, None, self._voxels(voxel_set, f"{name}.coords"), voxel_set.grid
        )

    def _voxels(self, voxel_set: VoxelSet, name: str) -> str:
        cast = self.emitter.standard("Cast", [voxel_set.voxels], f"{name}.int32", {"to": INT32})
        self._give(cast, name, INT32, (voxel_set.rows, 4))
        return name

    def _give(self, tensor: str, name: str, kind: int, shape: Sequence[int | str]) -> None:
        self.emitter.output(tensor, name, kind, shape)
