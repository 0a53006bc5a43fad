"""Draw the edges: straight where they can be, bent between layers, turned between columns."""

from __future__ import annotations

from collections.abc import Mapping

from ._boxes import GUTTER, HEADER, MARGIN, PAD, Box, Plan
from ._layers import Layering
from ._node import DrawnNode
from ._style import number as n

__all__ = ["draw_edges"]

_STEP = 15.0  # between edges that meet at one side of a node
_CORNER = 7.0


def draw_edges(layering: Layering, by_name: Mapping[str, DrawnNode], plan: Plan) -> list[str]:
    """One path for each edge, with its head at the reader; dashed where floats travel."""
    leaving, arriving = _ports(layering, plan)
    parts = []
    turns: dict[int, int] = {}
    for edge, path in layering.edges.items():
        node = by_name[edge[0]]
        integer = not node.floats and (node.place == "BPU" or node.boundary == "quantize")
        boxes = [plan.boxes[name] for name in path]
        shifts = [leaving[edge], *([0.0] * (len(path) - 2)), arriving[edge]]
        d = f"M{n(boxes[0].x + shifts[0])} {n(boxes[0].bottom)}"
        for i in range(len(boxes) - 1):
            start, end = boxes[i].x + shifts[i], boxes[i + 1].x + shifts[i + 1]
            if boxes[i].column == boxes[i + 1].column:
                d += _bend(boxes[i], boxes[i + 1], start, end)
            else:
                column = boxes[i].column
                turn = turns[column] = turns.get(column, -1) + 1
                d += _turn(
                    boxes[i + 1], start, end, turn, plan.rights[column], plan.bottoms[column]
                )
        style = "edge" if integer else "edge float"
        parts.append(f'<path class="{style}" marker-end="url(#head)" d="{d}"/>')
    return parts


Shifts = dict[tuple[str, str], float]


def _ports(layering: Layering, plan: Plan) -> tuple[Shifts, Shifts]:
    """Where along a node's side each edge leaves or arrives, so that no two fall into one."""
    leaving: dict[str, list[tuple[float, tuple[str, str]]]] = {}
    arriving: dict[str, list[tuple[float, tuple[str, str]]]] = {}
    for edge, path in layering.edges.items():
        first, second, before, last = (plan.boxes[path[i]] for i in (0, 1, -2, -1))
        away = second.x - first.x if second.column == first.column else 1e6
        back = before.x - last.x if before.column == last.column else -1e6
        leaving.setdefault(edge[0], []).append((away, edge))
        arriving.setdefault(edge[1], []).append((back, edge))
    return _spread(leaving, plan), _spread(arriving, plan)


def _spread(sides: dict[str, list[tuple[float, tuple[str, str]]]], plan: Plan) -> Shifts:
    shifts: Shifts = {}
    for name, edges in sides.items():
        edges.sort(key=lambda item: item[0])
        straight = [i for i, (offset, _) in enumerate(edges) if abs(offset) < 1]
        middle = straight[0] if straight else (len(edges) - 1) / 2
        half = plan.boxes[name].width / 2 - 14
        reach = max(middle, len(edges) - 1 - middle)
        step = min(_STEP, half / reach) if reach else 0.0
        for i, (_, edge) in enumerate(edges):
            shifts[edge] = (i - middle) * step
    return shifts


def _bend(upper: Box, lower: Box, start: float, end: float) -> str:
    if abs(start - end) < 0.5:
        return f" L{n(end)} {n(lower.top)}"
    middle = (upper.bottom + lower.top) / 2
    if not (upper.height and lower.height):  # beside a node: bend within the space alone
        return _bend_beside(upper, lower, start, end)
    return f" C{n(start)} {n(middle)} {n(end)} {n(middle)} {n(end)} {n(lower.top)}"


def _bend_beside(upper: Box, lower: Box, start: float, end: float) -> str:
    """Pass the full height of the layers straight and bend in the space between them."""
    high, low = upper.y + 19, lower.y - 19
    middle = (high + low) / 2
    lead = f" L{n(start)} {n(high)}" if upper.y + 19 > upper.bottom else ""
    tail = f" L{n(end)} {n(lower.top)}" if lower.top > low else ""
    return f"{lead} C{n(start)} {n(middle)} {n(end)} {n(middle)} {n(end)} {n(low)}{tail}"


def _turn(lower: Box, start: float, end: float, turn: int, right: float, bottom: float) -> str:
    """From the foot of one column to the head of the next, through the gutter between them."""
    gutter = right + PAD + (GUTTER - 2 * PAD) / 2 - 4 + 6 * turn
    foot = bottom + PAD + 9 + 6 * turn
    head = HEADER + MARGIN - PAD - 9 - 6 * turn
    r = n(_CORNER)
    return (
        f" L{n(start)} {n(foot - _CORNER)} q0 {r} {r} {r}"
        f" L{n(gutter - _CORNER)} {n(foot)} q{r} 0 {r} -{r}"
        f" L{n(gutter)} {n(head + _CORNER)} q0 -{r} {r} -{r}"
        f" L{n(end - _CORNER)} {n(head)} q{r} 0 {r} {r}"
        f" L{n(end)} {n(lower.top)}"
    )
