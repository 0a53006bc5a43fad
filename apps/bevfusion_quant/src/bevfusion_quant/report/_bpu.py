"""What runs on the BPU and what on the CPU: picture, boundaries, reasons, layers, estimate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bevfusion_quant.report._bpu_picture import partition_picture
from bevfusion_quant.report._bpu_tables import (
    boundary_table,
    estimate_table,
    layer_table,
    stage_table,
)
from bevfusion_quant.report._format import count
from bevfusion_quant.report._html import Html, join, path_name, tag
from bevfusion_quant.report._section import Section

if TYPE_CHECKING:
    from bevfusion_quant.results import BpuOutcome
    from bevquant_hybrid.partition import Plan, Segment

__all__ = ["bpu_section"]

UNITS = {"camera": "camera", "bev": "bird's-eye view"}
STEPS = (
    "Three executions on the same frames: float, fake-quantized, and integers as they are rounded "
    "on a BPU. A step is one integer of the result; max and mean compare integers with "
    "fake-quantized values, each model on its own activations, where a single step early on grows "
    "from layer to layer."
)
ESTIMATE = (
    "An estimate, not a measurement: each layer takes the longer of its operations at the cores' "
    "peak rate and its bytes at the memory's rate, every layer reads and writes memory, and layers "
    "follow one another. Use it to compare layers and plans; it promises no frame rate. What is "
    "computed along with the layer before it costs nothing of its own."
)


def bpu_section(outcome: BpuOutcome) -> Section:
    """The section "BPU and CPU"."""
    plan = outcome.plan
    html = tag(
        "div",
        tag("p", _verdict(outcome)),
        *(tag("p", text, class_="low") for text in outcome.violations),
        tag("ol", *(_segment(plan, s) for s in plan.segments), class_="flow",
            aria_label="Segments in an order in which they can run"),
        partition_picture(outcome.picture),
        tag("div", boundary_table(plan), stage_table(outcome.comparison.stages),
            class_="columns bpu-part"),
        _on_cpu(outcome),
        layer_table(outcome.comparison.layers),
        tag("p", STEPS, class_="note about"),
        *_estimates(outcome),
    )  # fmt: skip
    return Section("bpu", "BPU and CPU", html)


def _verdict(outcome: BpuOutcome) -> Html:
    plan = outcome.plan
    places = [node.place for node in plan.nodes if node.kind == "operator"]
    on_bpu = places.count("BPU")
    rest = len(places) - on_bpu
    return join(
        tag("strong", f"{on_bpu} operators run on the BPU"),
        f" (march {outcome.march}), {rest} on the CPU in float. {count(plan.transfer_bytes)} bytes "
        f"of integers cross the {len(plan.boundaries)} boundaries in a frame.",
    )


def _segment(plan: Plan, segment: Segment) -> Html:
    operators = [name for name in segment.nodes if plan.node(name).kind == "operator"]
    ends = list(dict.fromkeys((segment.nodes[0], segment.nodes[-1])))
    many = f"{len(operators)} operator{'s' * (len(operators) != 1)}"
    return tag(
        "li",
        tag("span", segment.place, class_="place"),
        tag("span", path_name(ends[0])),
        tag("span", "… ", path_name(ends[1])) if len(ends) > 1 else None,
        tag("span", many, class_="note"),
        class_=segment.place,
    )


def _on_cpu(outcome: BpuOutcome) -> Html:
    items = [
        tag("li", tag("code", path_name(node.path or node.name),
            tag("span", f" {node.operator}", class_="stem")), tag("p", node.reason))
        for node in outcome.on_cpu
    ]  # fmt: skip
    summary = tag(
        "summary", tag("span", "On the CPU, and why"), tag("span", str(len(items)), class_="count")
    )
    return tag("details", summary, tag("ul", *items), id="list-cpu", class_="decision", open=True)


def _estimates(outcome: BpuOutcome) -> Iterator[Html]:
    """What it rests on first, then a table for each unit."""
    first = next(iter(outcome.estimates.values()))
    figures = first.figures
    numbers = (
        ("10¹² operations a second, all cores", figures.peak_tops),
        ("BPU cores", figures.cores),
        ("10⁹ bytes a second to memory", figures.ddr_gigabytes_per_second),
    )
    yield tag("h3", f"Estimate for one core of {figures.chip}", class_="bpu-part")
    yield tag("p", ESTIMATE, class_="about")
    items = [
        tag("li", tag("p", tag("strong", f"{figure.value:g}"), f" {what} ({figure.basis}): "
            f"{figure.note}. ", tag("a", "source", href=figure.source, rel="noreferrer")))
        for what, figure in numbers
    ]  # fmt: skip
    yield tag("ul", *items, class_="sources")
    units = [
        tag(
            "div",
            tag("dt", UNITS[unit]),
            tag("dd", f"{estimate.seconds * 1e3:,.2f} ms"),
            tag("dd", "estimated", class_="note"),
        )
        for unit, estimate in outcome.estimates.items()
    ]
    yield tag("dl", *units, class_="figures")
    for unit, estimate in outcome.estimates.items():
        yield estimate_table(UNITS[unit], estimate)
