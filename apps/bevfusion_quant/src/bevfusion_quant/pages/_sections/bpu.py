"""Placement on BPU and CPU: picture, boundaries, reasons, layers, estimate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from bev_data.tables import CellParts, Column, Columns, Table, percent, table_of
from bevfusion.deployment import boundary_table, split_stage_table
from bevfusion_quant.bpu_outcome import BPU_UNITS, BpuOutcome
from bevfusion_quant.pages._content import ReportContent
from bevfusion_quant.pages._page import Section
from bevquant_hybrid_tools.account import plan_segments
from bevquant_hybrid_tools.forms import BpuEstimate, BpuLayer

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
        "stages": split_stage_table(outcome.comparison.stages),
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
    columns: Columns = {
        Column("Layer"): lambda row: CellParts(path=row.layer),
        Column("Operator", "minor text"): "{operator}",
        Column("Fake dB"): "{fake_sqnr_db:.1f}",
        Column("Integer dB"): "{integer_sqnr_db:.1f}",
        Column("Fake cosine", "minor"): "{fake_cosine:.5f}",
        Column("Integer cosine", "minor"): "{integer_cosine:.5f}",
        Column("Max steps"): "{max_steps:,}",
        Column("Mean steps", "minor"): "{mean_steps:.4f}",
        Column("Differ", "minor"): lambda row: percent(row.differ),
    }
    title = "Integers on the BPU, layer by layer"
    return table_of(title, layers, columns, "long", "dense plain", "bpu-layers")


def _estimates(outcome: BpuOutcome) -> Iterator[dict[str, Any]]:
    for unit, estimate in outcome.estimates.items():
        table = _estimate(BPU_UNITS[unit], estimate)
        yield {"unit": BPU_UNITS[unit], "seconds": estimate.seconds, "table": table}


def _estimate(unit: str, estimate: BpuEstimate) -> Table:
    columns: Columns = {
        Column("Layer"): lambda layer: CellParts(path=layer.path),
        Column("Operations", "minor"): "{operations:,.0f}",
        Column("Bytes", "minor"): lambda layer: f"{layer.loaded_bytes + layer.stored_bytes:,.0f}",
        Column("Estimated µs"): lambda layer: f"{layer.seconds * 1e6:.1f}",
        Column("Bound by", "text"): lambda layer: layer.bound or "–",
    }
    title, name = f"Estimated time of each layer: {unit}", f"estimate-{unit.split()[0]}"
    return table_of(title, estimate.layers, columns, "long", "dense plain", name)
