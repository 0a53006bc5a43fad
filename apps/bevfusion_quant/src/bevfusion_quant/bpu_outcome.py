"""Result of a run for a BPU: for the page, the screen and summary.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bev_data.metrics import Accuracy, accuracy_text, agreement_text
from bevfusion.deployment import SplitComparison, boundary_table, split_stage_table
from bevfusion.quantization import layer_table
from bevquant_hybrid.operators import load_support_table
from bevquant_hybrid.partition import Plan, PlanNode
from bevquant_hybrid_tools.account import (
    estimate_record,
    estimates_text,
    nodes_on_cpu,
    segments_text,
)
from bevquant_hybrid_tools.forms import BpuEstimate


@dataclass(frozen=True, eq=False)
class BpuOutcome:
    """Plan, comparison and estimate of one run.

    Attributes:
        plan: Placement of the whole model.
        comparison: Float, fake-quantized and integer model on the run's frames.
        estimates: Estimated time on the BPU, by unit.
        accuracy: Scores of the three models against labels; None without a head or labels.
    """

    plan: Plan
    comparison: SplitComparison
    estimates: Mapping[str, BpuEstimate]
    accuracy: Accuracy | None = None

    @property
    def march(self) -> str:
        """Name of the BPU's architecture in Horizon's spelling."""
        return load_support_table().march(self.plan.march).title

    @property
    def picture(self) -> str:
        """The plan as SVG text."""
        return self.plan.draw(title=f"Detector on CPU and BPU ({self.march})")

    @property
    def on_cpu(self) -> tuple[PlanNode, ...]:
        """Operators that run on the CPU."""
        return nodes_on_cpu(self.plan)

    @property
    def violations(self) -> tuple[str, ...]:
        """Operators that break a limit of the march."""
        return tuple(text for e in self.estimates.values() for text in e.violations)

    def summary(self) -> dict[str, Any]:
        """All results except the plan's nodes, which are in plan.json."""
        return {
            "march": self.plan.march,
            "transfer_bytes": self.plan.transfer_bytes,
            "segments": [asdict(segment) for segment in self.plan.segments],
            "boundaries": [asdict(boundary) for boundary in self.plan.boundaries],
            "on_cpu": [
                {"path": n.path, "what": n.operator, "reason": n.reason} for n in self.on_cpu
            ],
            "stages": self.comparison.stages,
            "layers": self.comparison.layers,
            "integer_agreement": self.comparison.agreement,
            "integer_labels_found": self.comparison.found,
            "estimates": {
                unit: estimate_record(estimate) for unit, estimate in self.estimates.items()
            },
        }


BPU_UNITS = {"camera": "camera", "bev": "bird's-eye view"}


def bpu_text(outcome: BpuOutcome) -> Iterator[str]:
    """Titles and tables: layers, stages, detections, accuracy, placement, estimate."""
    comparison = outcome.comparison
    evaluation = comparison.evaluation
    yield "Float against fake-quantized, output of each layer on the BPU"
    yield layer_table(evaluation.layers)
    yield "Stages, fake-quantized and integers against float"
    yield split_stage_table(comparison.stages).text()
    if evaluation.agreement:
        yield "Detections, float against fake-quantized, same class"
        yield agreement_text(evaluation.agreement, evaluation.found)
        yield "Detections, float against integers, same class"
        yield agreement_text(comparison.agreement, comparison.found, "integer")
    if outcome.accuracy is not None:
        yield "Against labels"
        yield accuracy_text(outcome.accuracy)
    yield f"BPU and CPU, march {outcome.march}"
    yield segments_text(outcome.plan)
    yield boundary_table(outcome.plan).text(without="encoders.")
    yield "On the CPU:\n" + "\n".join(f"  {n.name}: {n.reason}" for n in outcome.on_cpu)
    yield estimates_text({BPU_UNITS[name]: found for name, found in outcome.estimates.items()})
