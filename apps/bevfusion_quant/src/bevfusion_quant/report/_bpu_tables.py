"""Tables of a run for a BPU: boundaries, stages, layers, estimate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bevfusion_quant.report._format import count, fixed, percent
from bevfusion_quant.report._html import Content, Html, join, path_name, tag

if TYPE_CHECKING:
    from bevfusion_quant.results import BpuEstimate, BpuLayer, BpuStage
    from bevquant_hybrid.partition import Plan

__all__ = ["boundary_table", "estimate_table", "layer_table", "stage_table"]


def boundary_table(plan: Plan) -> Html:
    """Every crossing between float and integers, with its bytes."""
    rows = [
        _row(
            path_name(boundary.name),
            boundary.kind,
            join(path_name(boundary.source), " → ", *_commas(boundary.readers)),
            count(boundary.transfer_bytes),
        )
        for boundary in plan.boundaries
    ]
    rows.append(_row("together", "", "", count(plan.transfer_bytes)))
    heads = ("Boundary", "Kind", "From → to", "Bytes")
    return _pairs("Bytes of integers across each boundary, in a frame", heads, rows, "boundaries")


def stage_table(stages: Sequence[BpuStage]) -> Html:
    """Fake-quantized and integer model against float at the end of each stage."""
    rows = [
        _row(
            stage.title,
            fixed(stage.fake_sqnr_db, 1),
            fixed(stage.integer_sqnr_db, 1),
            fixed(stage.fake_cosine, 5),
            fixed(stage.integer_cosine, 5),
        )
        for stage in stages
    ]
    heads = ("Stage", "Fake dB", "Integer dB", "Fake cosine", "Integer cosine")
    return _pairs("SQNR and cosine against float", heads, rows)


def layer_table(layers: Sequence[BpuLayer]) -> Html:
    """Operators on the BPU: both quantized models against float, and against each other."""
    heads = (
        ("Layer", ""), ("Operator", "minor text"), ("Fake dB", ""), ("Integer dB", ""),
        ("Fake cosine", "minor"), ("Integer cosine", "minor"), ("Max steps", ""),
        ("Mean steps", "minor"), ("Differ", "minor"),
    )  # fmt: skip
    rows = [
        tag(
            "tr",
            tag("th", path_name(row.layer), scope="row"),
            tag("td", row.operator, class_="minor text"),
            tag("td", fixed(row.fake_sqnr_db, 1)),
            tag("td", fixed(row.integer_sqnr_db, 1)),
            tag("td", fixed(row.fake_cosine, 5), class_="minor"),
            tag("td", fixed(row.integer_cosine, 5), class_="minor"),
            tag("td", count(row.max_steps)),
            tag("td", fixed(row.mean_steps, 4), class_="minor"),
            tag("td", percent(row.differ), class_="minor"),
        )
        for row in layers
    ]
    return _scrolled("Integers on the BPU, layer by layer", "bpu-layers", heads, rows)


def estimate_table(unit: str, estimate: BpuEstimate) -> Html:
    """Operations, bytes and time of each layer, and what bounds it."""
    heads = (
        ("Layer", ""), ("Operations", "minor"), ("Bytes", "minor"), ("Estimated µs", ""),
        ("Bound by", "text"),
    )  # fmt: skip
    rows = [
        tag(
            "tr",
            tag("th", path_name(layer.path), scope="row"),
            tag("td", count(layer.operations), class_="minor"),
            tag("td", count(layer.loaded_bytes + layer.stored_bytes), class_="minor"),
            tag("td", fixed(layer.seconds * 1e6, 1)),
            tag("td", layer.bound or "–", class_="text"),
        )
        for layer in estimate.layers
    ]
    title = f"Estimated time of each layer: {unit}"
    return _scrolled(title, f"estimate-{unit.split()[0]}", heads, rows)


def _commas(names: Sequence[str]) -> Iterator[Html]:
    for index, name in enumerate(names):
        yield join(", " if index else "", path_name(name))


def _row(first: Content, *others: Content) -> Html:
    return tag("tr", tag("th", first, scope="row"), *(tag("td", other) for other in others))


def _pairs(title: str, heads: Sequence[str], rows: Sequence[Html], kind: str = "") -> Html:
    return tag(
        "table",
        tag("caption", title),
        tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads))),
        tag("tbody", *rows),
        class_=f"pairs classes {kind}".strip(),
    )


def _scrolled(
    title: str, name: str, heads: Sequence[tuple[str, str]], rows: Sequence[Html]
) -> Html:
    """A long table in a box of its own."""
    columns = [tag("th", head, scope="col", class_=kind or None) for head, kind in heads]
    table = tag(
        "table",
        tag("caption", title, class_="hidden"),
        tag("thead", tag("tr", *columns)),
        tag("tbody", *rows),
        id=name,
        class_="layer-table dense plain",
    )
    box = tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=title)
    return tag("div", tag("h3", title), box, class_="bpu-part")
