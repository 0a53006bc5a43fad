"""Where everything stands: boxes for nodes and for the places that long edges pass through."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ._columns import break_columns
from ._coordinates import place_layers, straighten
from ._layers import Layering
from ._node import DrawnNode
from ._style import CHARACTER, columns, fit

__all__ = ["GUTTER", "HEADER", "MARGIN", "PAD", "SIGNS", "SPACE", "Box", "Plan", "place_boxes",
           "second_line"]  # fmt: skip

HEADER = 74.0  # height of title and legend
MARGIN = 28.0
GUTTER = 56.0  # between columns
PAD = 9.0  # of a region around its nodes
SPACE = 28.0  # between layers
SIGNS = {"quantize": "Q", "dequantize": "DQ"}
_HEIGHT, _SIGN_HEIGHT = 38.0, 22.0  # of a node, of a boundary's sign
_GAP = 32.0  # between nodes of a layer
_PASSING = 10.0  # width that a passing edge takes
_WEIGHTS = (1e-6, 1e-3, 1.0)  # of passing edges, of signs and inputs, of operators
_LETTERS = 32  # of a name, at most
_PITCH = _HEIGHT + SPACE
# Boundaries that were put in are called after whom they serve; Q and DQ say the rest.
_SAID_BY_SIGN = re.compile(r"(?<=.)(_activation_post_process$|_input_dequant(_0$|(?=_\d+$)))")


@dataclass(frozen=True)
class Box:
    """A place in the picture: its centre and size; height 0 where an edge passes through."""

    x: float
    y: float
    width: float
    height: float
    column: int

    @property
    def top(self) -> float:
        """Upper edge."""
        return self.y - self.height / 2

    @property
    def bottom(self) -> float:
        """Lower edge."""
        return self.y + self.height / 2

    @property
    def left(self) -> float:
        """Left edge."""
        return self.x - self.width / 2

    @property
    def right(self) -> float:
        """Right edge."""
        return self.x + self.width / 2


@dataclass(frozen=True)
class Plan:
    """All boxes, first lines, the picture's size, and each column's right and lower ends."""

    boxes: dict[str, Box]
    lines: dict[str, str]
    width: float
    height: float
    rights: list[float]
    bottoms: list[float]


def second_line(node: DrawnNode) -> str:
    """Operator and detail, cut to what fits."""
    return fit(" · ".join(part for part in (node.operator, node.detail) if part), _LETTERS + 4)


def place_boxes(nodes: Sequence[DrawnNode], layering: Layering) -> Plan:
    """Place every node and every passing edge, in as many columns as suit a screen."""
    lines, widths = _lines_and_widths(nodes)
    signs = {node.name for node in nodes if node.boundary}
    every = {name: widths.get(name, _PASSING) for layer in layering.layers for name in layer}
    weights = {name: _WEIGHTS[0] for name in every}
    weights |= {n.name: _WEIGHTS[2 if n.place and not n.boundary else 1] for n in nodes}
    centres = place_layers(layering.layers, layering.neighbours, every, weights, _GAP)
    passing = [path[1:-1] for path in layering.edges.values() if len(path) > 2]
    straighten(centres, layering.layers, passing, every, PAD + 6)

    def extent(levels: range) -> tuple[float, float]:
        names = [name for level in levels for name in layering.layers[level]]
        start = min(centres[name] - every[name] / 2 for name in names)
        return start, max(centres[name] + every[name] / 2 for name in names) - start

    cuts = [len(pairs) for pairs in layering.neighbours]
    parts = break_columns(cuts, lambda p: extent(p)[1], _PITCH, gutter=GUTTER) if nodes else []
    boxes: dict[str, Box] = {}
    left = MARGIN + PAD
    rights, bottoms = [], []
    for index, levels in enumerate(parts):
        start, across = extent(levels)
        for row, level in enumerate(levels):
            y = HEADER + MARGIN + row * _PITCH + _HEIGHT / 2
            for name in layering.layers[level]:
                height = _SIGN_HEIGHT if name in signs else _HEIGHT if name in widths else 0.0
                boxes[name] = Box(left + centres[name] - start, y, every[name], height, index)
        rights.append(left + across)
        bottoms.append(HEADER + MARGIN + len(levels) * _PITCH - SPACE)
        left += across + GUTTER
    width = rights[-1] + PAD + MARGIN if rights else 2 * MARGIN
    return Plan(boxes, lines, width, max(bottoms, default=HEADER) + MARGIN + 12, rights, bottoms)


def _lines_and_widths(nodes: Sequence[DrawnNode]) -> tuple[dict[str, str], dict[str, float]]:
    """First lines, cut to what fits, and widths.

    Operators share one width, so that regions have straight sides; others take what they need, up
    to the width of a region.
    """
    lines, widths = {}, {}
    for node in nodes:
        if not node.boundary:
            lines[node.name] = fit(node.name, _LETTERS)
            letters = max(12 * columns(lines[node.name]), 10.5 * columns(second_line(node)))
            widths[node.name] = max(84.0, letters * CHARACTER + 34)
    card = max([136.0, *(widths[n.name] for n in nodes if n.place and not n.boundary)])
    for node in nodes:
        if node.boundary:
            sign = 11 * CHARACTER * (len(SIGNS[node.boundary]) + 1) + 28
            room = int((card + 2 * PAD - sign) / (11 * CHARACTER))
            lines[node.name] = fit(_SAID_BY_SIGN.sub("", node.name), room)
            widths[node.name] = sign + 11 * CHARACTER * columns(lines[node.name])
        elif node.place:
            widths[node.name] = card
    return lines, widths
