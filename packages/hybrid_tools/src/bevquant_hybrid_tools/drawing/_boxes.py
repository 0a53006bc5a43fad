"""Boxes of nodes and regions of one place: colours, type, shapes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from bevquant_hybrid_tools.drawing._layers import (
    DrawnNode,
    Layering,
    break_columns,
    place_layers,
    straighten,
)

CHARACTER = 0.602  # width of a monospaced letter over the size of the type

STYLE = """
svg { --page:#ffffff; --ink:#1d2733; --soft:#5b6876; --line:#64717f; --card:#ffffff;
  --bpu:#2f6fb3; --bpu-area:#dfebf8; --bpu-rim:#aecbe9;
  --cpu:#b4690e; --cpu-area:#fdecd4; --cpu-rim:#f1cd97;
  --plain:#8894a1; --quantize:#17795a; --dequantize:#7b4ba6; --on:#ffffff; }
@media (prefers-color-scheme: dark) { svg { --page:#12161b; --ink:#e8edf2; --soft:#a3afbb;
  --line:#8f9ba8; --card:#1b2128;
  --bpu:#6ea8e6; --bpu-area:#152b42; --bpu-rim:#2a4f78;
  --cpu:#e5a14b; --cpu-area:#3a2a12; --cpu-rim:#6b4d1f;
  --plain:#76828f; --quantize:#23845f; --dequantize:#8b5cb8; --on:#ffffff; } }
.page { fill:var(--page) }
text { font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;
  fill:var(--ink) }
.title { font-size:16px; font-weight:600 }
.name { font-size:12px; font-weight:600 }
.what { font-size:10.5px; fill:var(--soft) }
.key { font-size:11px; fill:var(--soft) }
.sign { font-size:11px; fill:var(--on) } .sign tspan { font-weight:700 }
.card { fill:var(--card); stroke-width:1.25 }
.card.BPU { stroke:var(--bpu) } .card.CPU { stroke:var(--cpu) } .card.plain { stroke:var(--plain) }
.bar.BPU { fill:var(--bpu) } .bar.CPU { fill:var(--cpu) }
.rim.BPU { fill:var(--bpu-rim) } .rim.CPU { fill:var(--cpu-rim) }
.area.BPU { fill:var(--bpu-area) } .area.CPU { fill:var(--cpu-area) }
.quantize { fill:var(--quantize) } .dequantize { fill:var(--dequantize) }
.edge { fill:none; stroke:var(--line); stroke-width:1.4; stroke-linejoin:round }
.edge.float { stroke-dasharray:5 3.5 }
.head { fill:var(--line) }
""".strip()

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

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
_RIM = 1.3
_SLACK = 2 * _RIM
_NEAR = 40.0  # between branches whose region has no hole between them


def safe(text: str) -> str:
    """``text`` for XML: markup escaped, forbidden characters shown as a box."""
    return escape(_NOT_XML.sub("\ufffd", text), quote=True)


def columns(text: str) -> int:
    """Width of ``text`` in letters: characters of East Asian scripts take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def fit(text: str, letters: int) -> str:
    """``text`` in at most so many letters; the middle is removed, since names differ at their ends.

    Example:
        >>> fit("backbone.layer4.2.downsample.0", 20)
        'backbone.…wnsample.0'
    """
    text = " ".join(text.split())
    if columns(text) <= letters:
        return text
    head, tail = text[: len(text) // 2], text[len(text) // 2 :]
    while columns(head) > (letters - 1) // 2:
        head = head[:-1]
    while columns(tail) > letters - 1 - columns(head):
        tail = tail[1:]
    return head + "…" + tail


def number(value: float) -> str:
    """A coordinate without needless digits."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


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


def draw_regions(layering: Layering, by_name: Mapping[str, DrawnNode], plan: Plan) -> list[str]:
    """The shapes of all regions, to lie below everything else."""
    placed = {
        name: node.place for name, node in by_name.items() if node.place and not node.boundary
    }
    parts = []
    for grow, style in ((_RIM, "rim"), (0.0, "area")):
        for name, place in placed.items():
            box = plan.boxes[name]
            pad = PAD + grow
            parts.append(
                _rectangle(f"{style} {place}", box.left - pad, box.top - pad, box.right + pad,
                           box.bottom + pad, pad + 5)
            )  # fmt: skip
        for (source, reader), path in layering.edges.items():
            upper, lower = plan.boxes[source], plan.boxes[reader]
            if placed.get(source) and placed.get(source) == placed.get(reader):
                if len(path) == 2 and upper.column == lower.column:
                    parts += _join(upper, lower, f"{style} {placed[source]}", grow)
        for left, right in _siblings(layering, placed, plan):
            parts.append(
                _bridge(plan.boxes[left], plan.boxes[right], f"{style} {placed[left]}", grow)
            )
    return parts


def _siblings(
    layering: Layering, placed: Mapping[str, str], plan: Plan
) -> Iterator[tuple[str, str]]:
    """Neighbours in a layer that are joined above or below: branches of one region."""
    ties: dict[str, set[str]] = {}
    for (source, reader), path in layering.edges.items():
        if len(path) == 2 and placed.get(source) and placed.get(source) == placed.get(reader):
            if plan.boxes[source].column == plan.boxes[reader].column:
                ties.setdefault(source, set()).add(reader)
                ties.setdefault(reader, set()).add(source)
    for layer in layering.layers:
        for left, right in pairwise(layer):
            apart = plan.boxes[right].left - plan.boxes[left].right
            if apart <= _NEAR and ties.get(left, set()) & ties.get(right, set()):
                yield left, right


def _bridge(left: Box, right: Box, style: str, grow: float) -> str:
    """Fill the slot between two branches."""
    pad = PAD + grow
    top, bottom = min(left.top, right.top) - pad, max(left.bottom, right.bottom) + pad
    return _rectangle(style, left.x, top, right.x, bottom, 0)


def _join(upper: Box, lower: Box, style: str, grow: float) -> Iterator[str]:
    """A bar in the space between two nodes' surroundings, and its ends into both of them.

    No other node's surroundings reach into that space, so a bar may pass them.
    """
    pad = PAD + grow
    high, low = upper.bottom + PAD - grow, lower.top - PAD + grow
    yield _rectangle(style, upper.left - pad, upper.y, upper.right + pad, high, 0)
    yield _rectangle(style, lower.left - pad, low, lower.right + pad, lower.y, 0)
    left, right = min(upper.left, lower.left) - pad, max(upper.right, lower.right) + pad
    # Round where the bar itself is the region's corner: above its free end, or below.
    corners = (
        lower.left < upper.left - _SLACK,
        lower.right > upper.right + _SLACK,
        upper.right > lower.right + _SLACK,
        upper.left < lower.left - _SLACK,
    )
    yield _bar(style, left, high, right, low, corners)


def _bar(
    style: str,
    left: float,
    top: float,
    right: float,
    bottom: float,
    corners: tuple[bool, bool, bool, bool],
) -> str:
    """A rectangle of which some corners are round, from the upper left one clockwise."""
    r = [(bottom - top) * 0.45 * round_ for round_ in corners]
    n = number
    return (
        f'<path class="{style}" d="M{n(left + r[0])} {n(top)} H{n(right - r[1])} '
        f"q{n(r[1])} 0 {n(r[1])} {n(r[1])} V{n(bottom - r[2])} q0 {n(r[2])} {n(-r[2])} {n(r[2])} "
        f"H{n(left + r[3])} q{n(-r[3])} 0 {n(-r[3])} {n(-r[3])} V{n(top + r[0])} "
        f'q0 {n(-r[0])} {n(r[0])} {n(-r[0])} z"/>'
    )


def _rectangle(
    style: str, left: float, top: float, right: float, bottom: float, corner: float
) -> str:
    n = number
    return (
        f'<rect class="{style}" x="{n(left)}" y="{n(top)}" width="{n(right - left)}" '
        f'height="{n(bottom - top)}" rx="{n(corner)}"/>'
    )
