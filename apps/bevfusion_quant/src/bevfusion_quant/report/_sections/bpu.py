"""What runs on the BPU and what on the CPU: picture, boundaries, reasons, layers, estimate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from bevfusion_quant.report._content import ReportContent
from bevfusion_quant.report._format import count, fixed, percent
from bevfusion_quant.report._page import Section
from bevfusion_quant.results import (
    BPU_UNITS,
    BpuEstimate,
    BpuLayer,
    BpuOutcome,
    CellParts,
    Column,
    Row,
    Table,
    boundary_table,
    bpu_stage_table,
    plan_segments,
)

ORDER = 70


def section(content: ReportContent) -> Section | None:
    """The section "BPU and CPU"."""
    outcome = content.bpu
    if outcome is None:
        return None
    plan = outcome.plan
    operators = [node for node in plan.nodes if node.kind == "operator"]
    on_bpu = sum(node.place == "BPU" for node in operators)
    data = {
        "on_bpu": on_bpu,
        "rest": len(operators) - on_bpu,
        "march": outcome.march,
        "transfer_bytes": plan.transfer_bytes,
        "crossings": len(plan.boundaries),
        "violations": outcome.violations,
        "segments": [
            {"place": place, "ends": ends, "operators": count}
            for place, ends, count in plan_segments(plan)
        ],
        # The plan itself: the page draws the picture, so that no markup is ever read from data.
        "plan": plan.to_json(),
        "boundaries": boundary_table(plan),
        "stages": bpu_stage_table(outcome.comparison.stages),
        "on_cpu": [
            {"path": node.path or node.name, "what": node.operator, "reason": node.reason}
            for node in outcome.on_cpu
        ],
        "layers": _layers(outcome.comparison.layers),
        "estimates": list(_estimates(outcome)),
        "figures": asdict(next(iter(outcome.estimates.values())).figures),
    }
    return Section("bpu", "BPU and CPU", data)


def _layers(layers: Sequence[BpuLayer]) -> Table:
    """Operators on the BPU: both quantized models against float, and against each other."""
    columns = (
        Column("Layer"), Column("Operator", "minor text"), Column("Fake dB"), Column("Integer dB"),
        Column("Fake cosine", "minor"), Column("Integer cosine", "minor"), Column("Max steps"),
        Column("Mean steps", "minor"), Column("Differ", "minor"),
    )  # fmt: skip
    rows = [
        Row(
            (
                CellParts(path=row.layer),
                row.operator,
                fixed(row.fake_sqnr_db, 1),
                fixed(row.integer_sqnr_db, 1),
                fixed(row.fake_cosine, 5),
                fixed(row.integer_cosine, 5),
                count(row.max_steps),
                fixed(row.mean_steps, 4),
                percent(row.differ),
            )
        )
        for row in layers
    ]
    title = "Integers on the BPU, layer by layer"
    return Table(title, columns, rows, "long", "bpu-layers", "dense plain")


def _estimates(outcome: BpuOutcome) -> Iterator[dict[str, Any]]:
    for unit, estimate in outcome.estimates.items():
        table = _estimate(BPU_UNITS[unit], estimate)
        yield {"unit": BPU_UNITS[unit], "seconds": estimate.seconds, "table": table}


def _estimate(unit: str, estimate: BpuEstimate) -> Table:
    """Operations, bytes and time of each layer, and what bounds it."""
    columns = (
        Column("Layer"), Column("Operations", "minor"), Column("Bytes", "minor"),
        Column("Estimated µs"), Column("Bound by", "text"),
    )  # fmt: skip
    rows = [
        Row(
            (
                CellParts(path=layer.path),
                count(layer.operations),
                count(layer.loaded_bytes + layer.stored_bytes),
                fixed(layer.seconds * 1e6, 1),
                layer.bound or "–",
            )
        )
        for layer in estimate.layers
    ]
    title, name = f"Estimated time of each layer: {unit}", f"estimate-{unit.split()[0]}"
    return Table(title, columns, rows, "long", name, "dense plain")
