"""What a picture is made of: plain nodes, checked before anything is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DrawnNode", "in_order"]

_PLACES = ("BPU", "CPU", "")
_BOUNDARIES = ("quantize", "dequantize", "")


@dataclass(frozen=True)
class DrawnNode:
    """One node of the picture.

    Attributes:
        name: Unique; the module's path or the graph node's name.
        operator: What it computes; the second line.
        place: ``"BPU"``, ``"CPU"``, or ``""`` for what runs nowhere: inputs, outputs, boundaries.
        inputs: Names of the nodes that it reads.
        boundary: ``"quantize"`` or ``"dequantize"`` where numbers change their type.
        detail: A few words more on the second line, such as a shape.
        note: Shown while the pointer rests on the node: why it is where it is.
        floats: Whether its result is floats although it runs on the BPU.
    """

    name: str
    operator: str = ""
    place: str = ""
    inputs: tuple[str, ...] = ()
    boundary: str = ""
    detail: str = ""
    note: str = ""
    floats: bool = False

    def __post_init__(self) -> None:
        """Refuse what the picture has no sign for."""
        if not self.name:
            raise ValueError("a node without a name cannot be drawn")
        if self.place not in _PLACES:
            raise ValueError(f"{self.name}: place {self.place!r}; expected one of {_PLACES}")
        if self.boundary not in _BOUNDARIES:
            raise ValueError(
                f"{self.name}: boundary {self.boundary!r}; expected one of {_BOUNDARIES}"
            )


def in_order(nodes: Sequence[DrawnNode]) -> list[DrawnNode]:
    """The nodes, each after what it reads, else in the order given.

    Raises:
        ValueError: If a name occurs twice, an input is no node, or nodes read one another in a
            circle.
    """
    by_name: dict[str, DrawnNode] = {}
    for node in nodes:
        if node.name in by_name:
            raise ValueError(f"two nodes are called {node.name!r}; names must be unique")
        by_name[node.name] = node
    for node in nodes:
        for source in node.inputs:
            if source not in by_name:
                raise ValueError(f"{node.name} reads {source!r}, which is no node of the picture")
    ordered: list[DrawnNode] = []
    done: set[str] = set()
    waiting = list(nodes)
    while waiting:
        ready = [node for node in waiting if done.issuperset(node.inputs)]
        if not ready:
            names = ", ".join(node.name for node in waiting[:5])
            raise ValueError(f"nodes read one another in a circle: {names}")
        for node in waiting:
            if done.issuperset(node.inputs):
                ordered.append(node)
                done.add(node.name)
        waiting = [node for node in waiting if node.name not in done]
    return ordered
