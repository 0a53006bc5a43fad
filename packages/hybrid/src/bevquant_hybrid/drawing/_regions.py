"""Draw the regions: the surroundings of nodes of one place, joined where one feeds the other.

Every shape is drawn twice, first as the rim and then, a little smaller, as the area: what overlaps
becomes one region with one outline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from ._boxes import PAD, Box, Plan
from ._layers import Layering
from ._node import DrawnNode
from ._style import number as n

__all__ = ["draw_regions"]

_RIM = 1.3
_SLACK = 2 * _RIM
_NEAR = 40.0  # between branches whose region has no hole between them


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
    return (
        f'<path class="{style}" d="M{n(left + r[0])} {n(top)} H{n(right - r[1])} '
        f"q{n(r[1])} 0 {n(r[1])} {n(r[1])} V{n(bottom - r[2])} q0 {n(r[2])} {n(-r[2])} {n(r[2])} "
        f"H{n(left + r[3])} q{n(-r[3])} 0 {n(-r[3])} {n(-r[3])} V{n(top + r[0])} "
        f'q0 {n(-r[0])} {n(r[0])} {n(-r[0])} z"/>'
    )


def _rectangle(
    style: str, left: float, top: float, right: float, bottom: float, corner: float
) -> str:
    return (
        f'<rect class="{style}" x="{n(left)}" y="{n(top)}" width="{n(right - left)}" '
        f'height="{n(bottom - top)}" rx="{n(corner)}"/>'
    )
