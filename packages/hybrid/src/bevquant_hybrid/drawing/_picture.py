"""Draw a partition as one SVG file that needs nothing from anywhere else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bevquant_hybrid._whole_file import write_whole

from ._boxes import MARGIN, SIGNS, Box, place_boxes, second_line
from ._edges import draw_edges
from ._layers import layer_nodes
from ._node import DrawnNode, in_order
from ._regions import draw_regions
from ._style import CHARACTER, STYLE, fit, safe
from ._style import number as n

__all__ = ["draw_partition", "write_partition"]

_NARROWEST = 600.0  # that the legend fits into


def draw_partition(nodes: Sequence[DrawnNode], *, title: str = "Partition") -> str:
    """The picture of a partition as SVG text.

    Data flows from top to bottom; a long model continues at the top of the next column. What runs
    on the BPU lies in blue regions, what runs on the CPU in orange ones. Quantize and dequantize
    boundaries are filled signs between them. Solid lines carry integers, dashed ones floats. The
    colours follow the viewer's light or dark scheme.

    Args:
        nodes: In any order.
        title: Above the picture.

    Raises:
        ValueError: If two nodes share a name, an input is no node, or there is a circle.

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
        *draw_edges(layering, by_name, plan),
        *(_draw_node(node, plan.boxes[node.name], plan.lines[node.name]) for node in ordered),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def write_partition(
    nodes: Sequence[DrawnNode], path: str | os.PathLike[str], *, title: str = "Partition"
) -> Path:
    """Write the picture to ``path``, whole or not at all; return the path."""
    return write_whole(path, draw_partition(nodes, title=title))


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
