"""Pictures of a model that is split between BPU and CPU, as SVG.

Edges and the page are here, boxes in `_boxes`, their order in `_layers`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from bevquant_hybrid import partition
from bevquant_hybrid_tools.drawing._boxes import (
    CHARACTER,
    GUTTER,
    HEADER,
    MARGIN,
    PAD,
    SIGNS,
    STYLE,
    Box,
    Plan,
    draw_regions,
    fit,
    place_boxes,
    safe,
    second_line,
)
from bevquant_hybrid_tools.drawing._boxes import number as n
from bevquant_hybrid_tools.drawing._layers import DrawnNode, Layering, in_order, layer_nodes
from bevquant_quantizers.documents import write_whole

__all__ = ["DrawnNode", "draw_partition", "draw_plan", "write_partition"]

_STEP = 15.0  # between edges that meet at one side of a node
_CORNER = 7.0
_NARROWEST = 600.0  # that the legend fits into

Shifts = dict[tuple[str, str], float]


def _draw_edges(layering: Layering, by_name: Mapping[str, DrawnNode], plan: Plan) -> list[str]:
    """One path for each edge, with its arrowhead at the consumer; dashed for floats."""
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


def _ports(layering: Layering, plan: Plan) -> tuple[Shifts, Shifts]:
    """Distinct positions of the edges along each node's side."""
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


def draw_partition(nodes: Sequence[DrawnNode], *, title: str = "Partition") -> str:
    """The picture of a partition as SVG text.

    Data flows from top to bottom; a long model continues at the top of the next column. BPU nodes
    lie in blue regions, CPU nodes in orange ones. Filled signs between them are quantize and
    dequantize boundaries. Solid lines carry integers, dashed ones floats. The colours follow the
    viewer's light or dark scheme.

    Args:
        nodes: In any order.
        title: Above the picture.

    Raises:
        ValueError: If two nodes share a name, an input is not a node, or the graph has a cycle.

    Example:
        >>> picture = draw_partition([
        ...     DrawnNode("x"),
        ...     DrawnNode("quant", "QuantStub", inputs=("x",), boundary="quantize"),
        ...     DrawnNode("conv", "Conv2d", "BPU", ("quant",)),
        ... ])
        >>> picture.startswith("<svg "), picture.count('class="card')
        (True, 2)
    """
    ordered = in_order(nodes)
    by_name = {node.name: node for node in ordered}
    layering = layer_nodes(ordered)
    plan = place_boxes(ordered, layering)
    width, height = n(max(plan.width, _NARROWEST)), n(plan.height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="t d">',
        f'<title id="t">{safe(title)}</title>',
        f'<desc id="d">{safe(_describe(ordered))}</desc>',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto" markerUnits="userSpaceOnUse"><path class="head" '
        'd="M0 0.8 L8 4 L0 7.2 z"/></marker></defs>',
        '<rect class="page" width="100%" height="100%"/>',
        *_header(title, ordered),
        *draw_regions(layering, by_name, plan),
        *_draw_edges(layering, by_name, plan),
        *(_draw_node(node, plan.boxes[node.name], plan.lines[node.name]) for node in ordered),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def draw_plan(plan: partition.Plan, *, title: str | None = None) -> str:
    """The picture of a plan as SVG text."""
    drawn = [
        DrawnNode(
            node.name,
            node.operator.rpartition(".")[2],
            "" if node.kind in ("quantize", "dequantize") else node.place,
            node.inputs,
            node.kind if node.kind in ("quantize", "dequantize") else "",
            "×".join(map(str, node.shape)) if node.shape else "",
            node.reason,
        )
        for node in plan.nodes
    ]
    return draw_partition(drawn, title=title or f"Partition for {plan.march}")


def write_partition(
    nodes: Sequence[DrawnNode], path: str | os.PathLike[str], *, title: str = "Partition"
) -> Path:
    """Write the picture to ``path`` atomically; return the path."""
    return write_whole(path, draw_partition(nodes, title=title), parents=True)


def _describe(nodes: Sequence[DrawnNode]) -> str:
    bpu, cpu = (sum(node.place == place for node in nodes) for place in ("BPU", "CPU"))
    signs = sum(bool(node.boundary) for node in nodes)
    return f"{bpu} operators on the BPU, {cpu} on the CPU, {signs} boundaries between them"


def _header(title: str, nodes: Sequence[DrawnNode]) -> list[str]:
    parts = [f'<text class="title" x="{n(MARGIN)}" y="36">{safe(fit(title, 56))}</text>']
    x = MARGIN
    for kind in ("BPU", "CPU", "quantize", "dequantize", "integers", "floats"):
        count = sum(kind in (node.place, node.boundary) for node in nodes)
        words = kind if kind in ("integers", "floats") else f"{kind} {count}"
        if kind in ("BPU", "CPU"):
            parts.append(
                f'<rect class="rim {kind}" x="{n(x)}" y="53" width="18" height="13" rx="4"/>'
                f'<rect class="area {kind}" x="{n(x + 1.2)}" y="54.2" width="15.6" height="10.6" '
                'rx="3"/>'
            )
        elif kind in ("quantize", "dequantize"):
            parts.append(
                f'<rect class="{kind}" x="{n(x - 1)}" y="52" width="24" height="15" rx="7.5"/>'
                f'<text class="sign" text-anchor="middle" x="{n(x + 11)}" y="63.5">'
                f"<tspan>{SIGNS[kind]}</tspan></text>"
            )
            x += 4
        else:
            style = "edge float" if kind == "floats" else "edge"
            parts.append(f'<path class="{style}" d="M{n(x)} 59.5 h22"/>')
            x += 4
        parts.append(f'<text class="key" x="{n(x + 24)}" y="63.5">{words}</text>')
        x += 24 + 11 * CHARACTER * len(words) + 18
    return parts


def _draw_node(node: DrawnNode, box: Box, first: str) -> str:
    words = (node.operator, node.detail, node.place, node.boundary)
    hint = "\n".join(p for p in (node.name, " · ".join(w for w in words if w), node.note) if p)
    shape = f'x="{n(box.left)}" y="{n(box.top)}" width="{n(box.width)}" height="{n(box.height)}"'
    second = second_line(node)
    if node.boundary:
        return (
            f'<g><title>{safe(hint)}</title><rect class="{node.boundary}" {shape} '
            f'rx="{n(box.height / 2)}"/><text class="sign" text-anchor="middle" x="{n(box.x)}" '
            f'y="{n(box.y + 4)}"><tspan>{SIGNS[node.boundary]}</tspan> {safe(first)}</text></g>'
        )
    corner = 6.0 if node.place else box.height / 2
    parts = [
        f'<g><title>{safe(hint)}</title><rect class="card {node.place or "plain"}" {shape} '
        f'rx="{n(corner)}"/>'
    ]
    anchor, x = ' text-anchor="middle"', box.x
    if node.place:
        anchor, x = "", box.left + 17
        parts.append(
            f'<rect class="bar {node.place}" x="{n(box.left + 5)}" y="{n(box.top + 6)}" '
            f'width="3.5" height="{n(box.height - 12)}" rx="1.75"/>'
        )
    y = box.y + (-3 if second else 4)
    parts.append(f'<text class="name"{anchor} x="{n(x)}" y="{n(y)}">{safe(first)}</text>')
    if second:
        parts.append(
            f'<text class="what"{anchor} x="{n(x)}" y="{n(box.y + 12)}">{safe(second)}</text>'
        )
    return "".join([*parts, "</g>"])
