"""Pictures of a model that is split between BPU and CPU, as SVG; `_layers` places the nodes."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from bevquant_hybrid import partition
from bevquant_hybrid_tools.drawing._layers import (
    DrawnNode,
    Layering,
    break_columns,
    in_order,
    layer_nodes,
    place_layers,
    straighten,
)
from bevquant_quantizers.documents import write_whole

__all__ = ["DrawnNode", "draw_partition", "draw_plan", "write_partition"]

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# Boundaries that were put in are called after whom they serve; Q and DQ say the rest.
_SAID_BY_SIGN = re.compile(r"(?<=.)(_activation_post_process$|_input_dequant(_0$|(?=_\d+$)))")
_SIGNS = {"quantize": "Q", "dequantize": "DQ"}
_CHARACTER = 0.602  # width of a monospaced letter over the size of the type
_LETTERS = 32  # of a name, at most
# In pixels:
_NARROWEST = 600.0  # that the legend fits into
_HEADER = 74.0  # height of title and legend
_MARGIN = 28.0
_GUTTER = 56.0  # between columns
_PAD = 9.0  # of a region around its nodes
_RIM = 1.3
_HEIGHT, _SIGN_HEIGHT = 38.0, 22.0  # of a node, of a boundary's sign
_PITCH = _HEIGHT + 28.0  # from layer to layer
_GAP = 32.0  # between nodes of a layer
_NEAR = 40.0  # between branches whose region has no hole between them
_PASSING = 10.0  # width that a passing edge takes
_STEP = 15.0  # between edges that meet at one side of a node
_WEIGHTS = (1e-6, 1e-3, 1.0)  # of passing edges, of signs and inputs, of operators

_Edge = tuple[str, str]


class _Box(NamedTuple):
    """Centre and size of a node; height 0 where an edge passes through."""

    x: float
    y: float
    width: float
    height: float
    column: int

    @property
    def top(self) -> float:
        return self.y - self.height / 2

    @property
    def bottom(self) -> float:
        return self.y + self.height / 2

    @property
    def left(self) -> float:
        return self.x - self.width / 2

    @property
    def right(self) -> float:
        return self.x + self.width / 2


class _Placed(NamedTuple):
    """All boxes, first lines, the picture's size, and each column's right and lower ends."""

    boxes: dict[str, _Box]
    lines: dict[str, str]
    width: float
    height: float
    rights: list[float]
    bottoms: list[float]


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
    placed = _place(ordered, layering)
    width, height = _n(max(placed.width, _NARROWEST)), _n(placed.height)
    bpu, cpu = (sum(node.place == place for node in nodes) for place in ("BPU", "CPU"))
    signs = sum(bool(node.boundary) for node in nodes)
    style = (resources.files(__package__) / "style.css").read_text(encoding="utf-8")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="t d">',
        f'<title id="t">{_safe(title)}</title>',
        f'<desc id="d">{bpu} operators on the BPU, {cpu} on the CPU, {signs} boundaries between '
        "them</desc>",
        f"<style>{style.strip()}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto" markerUnits="userSpaceOnUse"><path class="head" '
        'd="M0 0.8 L8 4 L0 7.2 z"/></marker></defs>',
        '<rect class="page" width="100%" height="100%"/>',
        f'<text class="title" x="{_n(_MARGIN)}" y="36">{_safe(_fit(title, 56))}</text>',
        *_legend(ordered),
        *_regions(layering, by_name, placed),
        *_edges(layering, by_name, placed),
        *(_drawn(node, placed.boxes[node.name], placed.lines[node.name]) for node in ordered),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def draw_plan(plan: partition.Plan, *, title: str | None = None) -> str:
    """The picture of a plan as SVG text."""
    drawn = []
    for node in plan.nodes:
        boundary = node.kind if node.kind in _SIGNS else ""
        place, shape = "" if boundary else node.place, "×".join(map(str, node.shape or ()))
        operator = node.operator.rpartition(".")[2]
        about = operator, place, node.inputs, boundary, shape, node.reason
        drawn.append(DrawnNode(node.name, *about))
    return draw_partition(drawn, title=title or f"Partition for {plan.march}")


def write_partition(
    nodes: Sequence[DrawnNode], path: str | os.PathLike[str], *, title: str = "Partition"
) -> Path:
    """Write the picture to ``path`` atomically; return the path."""
    return write_whole(path, draw_partition(nodes, title=title), parents=True)


def _safe(text: str) -> str:
    """``text`` for XML: markup escaped, forbidden characters shown as a box."""
    return escape(_NOT_XML.sub("\ufffd", text), quote=True)


def _columns(text: str) -> int:
    """Width of ``text`` in letters: characters of East Asian scripts take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _fit(text: str, letters: int) -> str:
    """``text`` in at most so many letters; the middle is removed, since names differ at their ends.

    Example:
        >>> _fit("backbone.layer4.2.downsample.0", 20)
        'backbone.…wnsample.0'
    """
    text = " ".join(text.split())
    if _columns(text) <= letters:
        return text
    head, tail = text[: len(text) // 2], text[len(text) // 2 :]
    while _columns(head) > (letters - 1) // 2:
        head = head[:-1]
    while _columns(tail) > letters - 1 - _columns(head):
        tail = tail[1:]
    return head + "…" + tail


def _n(value: float) -> str:
    """A coordinate without needless digits."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _second_line(node: DrawnNode) -> str:
    return _fit(" · ".join(part for part in (node.operator, node.detail) if part), _LETTERS + 4)


def _place(nodes: Sequence[DrawnNode], layering: Layering) -> _Placed:
    """Place every node and every passing edge, in as many columns as suit a screen."""
    lines, widths = _lines_and_widths(nodes)
    signs = {node.name for node in nodes if node.boundary}
    every = {name: widths.get(name, _PASSING) for layer in layering.layers for name in layer}
    weights = dict.fromkeys(every, _WEIGHTS[0])
    weights |= {x.name: _WEIGHTS[2 if x.place and not x.boundary else 1] for x in nodes}
    centres = place_layers(layering, every, weights, _GAP)
    passing = [path[1:-1] for path in layering.edges.values() if len(path) > 2]
    straighten(centres, layering, passing, every, _PAD + 6)

    def extent(levels: range) -> tuple[float, float]:
        names = [name for level in levels for name in layering.layers[level]]
        start = min(centres[name] - every[name] / 2 for name in names)
        return start, max(centres[name] + every[name] / 2 for name in names) - start

    cuts = [len(pairs) for pairs in layering.neighbours]
    parts = break_columns(cuts, lambda p: extent(p)[1], _PITCH, gutter=_GUTTER) if nodes else []
    boxes: dict[str, _Box] = {}
    left = _MARGIN + _PAD
    rights, bottoms = [], []
    for index, levels in enumerate(parts):
        start, across = extent(levels)
        for row, level in enumerate(levels):
            y = _HEADER + _MARGIN + row * _PITCH + _HEIGHT / 2
            for name in layering.layers[level]:
                height = _SIGN_HEIGHT if name in signs else _HEIGHT if name in widths else 0.0
                boxes[name] = _Box(left + centres[name] - start, y, every[name], height, index)
        rights.append(left + across)
        bottoms.append(y + _HEIGHT / 2)
        left += across + _GUTTER
    width = rights[-1] + _PAD + _MARGIN if rights else 2 * _MARGIN
    return _Placed(
        boxes, lines, width, max(bottoms, default=_HEADER) + _MARGIN + 12, rights, bottoms
    )


def _lines_and_widths(nodes: Sequence[DrawnNode]) -> tuple[dict[str, str], dict[str, float]]:
    """First lines, cut to the available width, and widths."""
    lines, widths = {}, {}
    for node in nodes:
        if not node.boundary:
            lines[node.name] = _fit(node.name, _LETTERS)
            letters = max(12 * _columns(lines[node.name]), 10.5 * _columns(_second_line(node)))
            widths[node.name] = max(84.0, letters * _CHARACTER + 34)
    # Operators share one width, so that regions have straight sides; others are as wide as their
    # text, up to the width of a region.
    card = max([136.0, *(widths[x.name] for x in nodes if x.place and not x.boundary)])
    letter = 11 * _CHARACTER
    for node in nodes:
        if node.boundary:
            sign = letter * (len(_SIGNS[node.boundary]) + 1) + 28
            room = int((card + 2 * _PAD - sign) / letter)
            lines[node.name] = _fit(_SAID_BY_SIGN.sub("", node.name), room)
            widths[node.name] = sign + letter * _columns(lines[node.name])
        elif node.place:
            widths[node.name] = card
    return lines, widths


def _legend(nodes: Sequence[DrawnNode]) -> Iterator[str]:
    x = _MARGIN
    for kind in ("BPU", "CPU", "quantize", "dequantize", "integers", "floats"):
        count = sum(kind in (node.place, node.boundary) for node in nodes)
        words = kind if kind in ("integers", "floats") else f"{kind} {count}"
        if kind in ("BPU", "CPU"):
            yield _rectangle(f"rim {kind}", x, 53, x + 18, 66, 4)
            yield _rectangle(f"area {kind}", x + 1.2, 54.2, x + 16.8, 64.8, 3)
        elif kind in _SIGNS:
            yield _rectangle(kind, x - 1, 52, x + 23, 67, 7.5) + _sign(x + 11, 63.5, kind)
            x += 4
        else:
            style = "edge float" if kind == "floats" else "edge"
            yield f'<path class="{style}" d="M{_n(x)} 59.5 h22"/>'
            x += 4
        yield f'<text class="key" x="{_n(x + 24)}" y="63.5">{words}</text>'
        x += 24 + 11 * _CHARACTER * len(words) + 18


def _sign(x: float, y: float, boundary: str, text: str = "") -> str:
    return (
        f'<text class="sign" text-anchor="middle" x="{_n(x)}" y="{_n(y)}">'
        f"<tspan>{_SIGNS[boundary]}</tspan>{text}</text>"
    )


def _rectangle(
    style: str, left: float, top: float, right: float, bottom: float, corner: float = 0
) -> str:
    return (
        f'<rect class="{style}" x="{_n(left)}" y="{_n(top)}" width="{_n(right - left)}" '
        f'height="{_n(bottom - top)}" rx="{_n(corner)}"/>'
    )


def _regions(
    layering: Layering, by_name: Mapping[str, DrawnNode], placed: _Placed
) -> Iterator[str]:
    """The shapes of all regions, to lie below everything else."""
    places = {name: x.place for name, x in by_name.items() if x.place and not x.boundary}
    boxes = placed.boxes
    joined = [
        (source, reader)
        for (source, reader), path in layering.edges.items()
        if len(path) == 2 and boxes[source].column == boxes[reader].column
        if places.get(source) and places[source] == places.get(reader)
    ]
    # All rims first: an area covers the rims inside its region, so that one outline is left.
    for grow, style in ((_RIM, "rim"), (0.0, "area")):
        pad = _PAD + grow
        for name, place in places.items():
            left, top = boxes[name].left - pad, boxes[name].top - pad
            right, bottom = boxes[name].right + pad, boxes[name].bottom + pad
            yield _rectangle(f"{style} {place}", left, top, right, bottom, pad + 5)
        for source, reader in joined:
            yield _joint(f"{style} {places[source]}", boxes[source], boxes[reader], grow)
        for one, other in _siblings(layering, joined, boxes):
            first, second = boxes[one], boxes[other]  # fill the slot between two branches
            top = min(first.top, second.top) - pad
            bottom = max(first.bottom, second.bottom) + pad
            yield _rectangle(f"{style} {places[one]}", first.x, top, second.x, bottom)


def _joint(style: str, upper: _Box, lower: _Box, grow: float) -> str:
    """The joint of two nodes of a region. No other region reaches between its layers."""
    pad = _PAD + grow
    left, right = upper.left - pad, upper.right + pad
    high, low = upper.bottom + _PAD - grow, lower.top - _PAD + grow
    return (
        f'<path class="{style}" d="M{_n(left)} {_n(upper.y)} H{_n(right)} V{_n(high)} '
        f"L{_n(lower.right + pad)} {_n(low)} V{_n(lower.y)} H{_n(lower.left - pad)} V{_n(low)} "
        f'L{_n(left)} {_n(high)} z"/>'
    )


def _siblings(
    layering: Layering, joined: Sequence[_Edge], boxes: Mapping[str, _Box]
) -> Iterator[_Edge]:
    """Neighbours in a layer that are joined above or below: branches of one region."""
    ties: dict[str, set[str]] = {}
    for edge in joined:
        for mine, other in (edge, edge[::-1]):
            ties.setdefault(mine, set()).add(other)
    for layer in layering.layers:
        for left, right in pairwise(layer):
            near = boxes[right].left - boxes[left].right <= _NEAR
            if near and ties.get(left, set()) & ties.get(right, set()):
                yield left, right


def _edges(layering: Layering, by_name: Mapping[str, DrawnNode], placed: _Placed) -> Iterator[str]:
    """One path for each edge, with its arrowhead at the consumer; dashed for floats."""
    leaving, arriving = _ports(layering, placed.boxes)
    turns: Counter[int] = Counter()
    for edge, path in layering.edges.items():
        node = by_name[edge[0]]
        integer = not node.floats and (node.place == "BPU" or node.boundary == "quantize")
        boxes = [placed.boxes[name] for name in path]
        across = [box.x for box in boxes]
        across[0] += leaving[edge]
        across[-1] += arriving[edge]
        d = f"M{_n(across[0])} {_n(boxes[0].bottom)}"
        steps = pairwise(zip(boxes, across, strict=True))
        for (upper, start), (lower, end) in steps:
            column = upper.column
            if column == lower.column:
                d += _bend(upper, lower, start, end)
            else:
                ends = placed.rights[column], placed.bottoms[column]
                # Six pixels apart, so that edges through one gutter do not cover each other.
                d += _turn(lower, start, end, 6 * turns[column], *ends)
                turns[column] += 1
        style = "edge" if integer else "edge float"
        yield f'<path class="{style}" marker-end="url(#head)" d="{d}"/>'


def _ports(
    layering: Layering, boxes: Mapping[str, _Box]
) -> tuple[dict[_Edge, float], dict[_Edge, float]]:
    """Offsets of the edges along the lower and upper sides of their nodes, each its own."""
    sides: tuple[dict[str, list[tuple[float, _Edge]]], ...] = ({}, {})
    for edge, path in layering.edges.items():
        ends = ((path[0], path[1], 1e6), (path[-1], path[-2], -1e6))
        for side, (name, beside, elsewhere) in zip(sides, ends, strict=True):
            box, other = boxes[name], boxes[beside]
            # Edges to another column leave on the right and arrive from the left.
            offset = other.x - box.x if other.column == box.column else elsewhere
            side.setdefault(name, []).append((offset, edge))
    leaving, arriving = (_spread(side, boxes) for side in sides)
    return leaving, arriving


def _spread(
    side: Mapping[str, list[tuple[float, _Edge]]], boxes: Mapping[str, _Box]
) -> dict[_Edge, float]:
    shifts: dict[_Edge, float] = {}
    for name, edges in side.items():
        edges.sort(key=lambda item: item[0])
        straight = [i for i, (offset, _) in enumerate(edges) if abs(offset) < 1]
        middle = straight[0] if straight else (len(edges) - 1) / 2
        reach = max(middle, len(edges) - 1 - middle)
        step = min(_STEP, (boxes[name].width / 2 - 14) / reach) if reach else 0.0
        shifts |= {edge: (i - middle) * step for i, (_, edge) in enumerate(edges)}
    return shifts


def _bend(upper: _Box, lower: _Box, start: float, end: float) -> str:
    """A curve in the space between two layers; through the layers themselves it is straight."""
    if abs(start - end) < 0.5:
        return f" L{_n(end)} {_n(lower.top)}"
    high, low = upper.y + _HEIGHT / 2, lower.y - _HEIGHT / 2
    middle = _n((high + low) / 2)
    curve = f"C{_n(start)} {middle} {_n(end)} {middle} {_n(end)} {_n(low)}"
    return f" L{_n(start)} {_n(high)} {curve} L{_n(end)} {_n(lower.top)}"


def _turn(lower: _Box, start: float, end: float, shift: float, right: float, bottom: float) -> str:
    """From the foot of one column to the head of the next, through the gutter between them."""
    gutter = _n(right + _GUTTER / 2 - 4 + shift)
    foot, head = _n(bottom + _PAD + 9 + shift), _n(_HEADER + _MARGIN - _PAD - 9 - shift)
    down = f"L{_n(start)} {foot} L{gutter} {foot}"
    return f" {down} L{gutter} {head} L{_n(end)} {head} L{_n(end)} {_n(lower.top)}"


def _drawn(node: DrawnNode, box: _Box, first: str) -> str:
    words = (node.operator, node.detail, node.place, node.boundary)
    hint = "\n".join(p for p in (node.name, " · ".join(w for w in words if w), node.note) if p)
    style = node.boundary or f"card {node.place or 'plain'}"
    corner = 6.0 if node.place and not node.boundary else box.height / 2
    shape = _rectangle(style, box.left, box.top, box.right, box.bottom, corner)
    parts = [f"<g><title>{_safe(hint)}</title>{shape}"]
    if node.boundary:
        return f"{parts[0]}{_sign(box.x, box.y + 4, node.boundary, f' {_safe(first)}')}</g>"
    second = _second_line(node)
    anchor, x = ' text-anchor="middle"', box.x
    if node.place:
        anchor, x = "", box.left + 17
        left, top, bottom = box.left + 5, box.top + 6, box.bottom - 6
        parts.append(_rectangle(f"bar {node.place}", left, top, left + 3.5, bottom, 1.75))
    lines = [("name", first, -3 if second else 4)] + [("what", second, 12)] * bool(second)
    for kind, text, down in lines:
        place = f'x="{_n(x)}" y="{_n(box.y + down)}"'
        parts.append(f'<text class="{kind}"{anchor} {place}>{_safe(text)}</text>')
    return "".join([*parts, "</g>"])
