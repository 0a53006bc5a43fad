"""A run for a BPU as text for the screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bev_data.metrics import accuracy_text, aligned_table
from bevfusion_quant.measure import agreement_text, layer_table
from bevfusion_quant.results import boundary_table, bpu_stage_table

if TYPE_CHECKING:
    from bevfusion_quant.results import BpuOutcome
    from bevquant_hybrid.partition import Plan

__all__ = ["bpu_text"]

_UNITS = {"camera": "camera", "bev": "bird's-eye view"}


def bpu_text(outcome: BpuOutcome) -> Iterator[str]:
    """Titles and tables: layers, stages, detections, accuracy, what runs where, estimate."""
    comparison = outcome.comparison
    judgement = comparison.judgement
    yield "Float against fake-quantized, output of each layer on the BPU"
    yield layer_table(judgement.layers)
    yield "Stages, fake-quantized and integers against float"
    yield bpu_stage_table(comparison.stages).text()
    if judgement.agreement:
        yield "Detections, float against fake-quantized, same class"
        yield agreement_text(judgement.agreement, judgement.found)
        yield "Detections, float against integers, same class"
        yield agreement_text(comparison.agreement, comparison.found, "integer")
    if outcome.accuracy is not None:
        yield "Against labels"
        yield accuracy_text(outcome.accuracy)
    yield f"BPU and CPU, march {outcome.march}"
    yield _segments(outcome.plan)
    yield boundary_table(outcome.plan).text()
    yield "On the CPU:\n" + "\n".join(f"  {n.name}: {n.reason}" for n in outcome.on_cpu)
    yield _estimate(outcome)


def _segments(plan: Plan) -> str:
    rows = []
    for segment in plan.segments:
        operators = [name for name in segment.nodes if plan.node(name).kind == "operator"]
        named = dict.fromkeys((segment.nodes[0], segment.nodes[-1]))
        rows.append((" … ".join(named), segment.place, str(len(operators))))
    return aligned_table(("segment", "runs on", "operators"), rows)


def _estimate(outcome: BpuOutcome) -> str:
    """Milliseconds of each unit, and what they are worth."""
    rows = [
        (
            _UNITS[unit],
            f"{sum(layer.operations for layer in estimate.layers) / 1e9:,.1f}",
            f"{sum(x.loaded_bytes + x.stored_bytes for x in estimate.layers) / 1e6:,.1f}",
            f"{estimate.seconds * 1e3:,.2f}",
        )
        for unit, estimate in outcome.estimates.items()
    ]
    first = next(iter(outcome.estimates.values()))
    title = (
        f"Estimate for one core of {first.figures.chip}: a roofline from public figures, no "
        "measurement"
    )
    table = aligned_table(("unit", "10⁹ operations", "MB moved", "ms"), rows)
    return f"{title}\n\n{table}"
