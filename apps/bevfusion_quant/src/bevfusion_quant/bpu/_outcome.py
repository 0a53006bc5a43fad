"""Everything that a run for a BPU found out: for the page, the screen and summary.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bevquant_hybrid.operators import load_support_table

if TYPE_CHECKING:
    from bev_data.metrics import Accuracy
    from bevfusion_quant.bpu._estimate import BpuEstimate
    from bevfusion_quant.bpu._rows import BpuComparison
    from bevquant_hybrid.partition import Plan, PlanNode

__all__ = ["BpuOutcome"]


@dataclass(frozen=True, eq=False)
class BpuOutcome:
    """Plan, comparison and estimate of one run.

    Attributes:
        plan: Of the whole model.
        comparison: Float, fake-quantized and integers on the run's frames.
        estimates: What the units cost on the BPU, by unit.
        accuracy: All three models judged by labels; None where a run does not, without a head or
            without labels.
    """

    plan: Plan
    comparison: BpuComparison
    estimates: Mapping[str, BpuEstimate]
    accuracy: Accuracy | None = None

    @property
    def march(self) -> str:
        """The BPU's architecture as its maker writes it."""
        return load_support_table().march(self.plan.march).title

    @property
    def picture(self) -> str:
        """The plan as SVG text."""
        return self.plan.draw(title=f"BEVFusion on CPU and BPU ({self.march})")

    @property
    def on_cpu(self) -> tuple[PlanNode, ...]:
        """Operators that run on the CPU."""
        return tuple(n for n in self.plan.nodes if n.kind == "operator" and n.place == "CPU")

    @property
    def violations(self) -> tuple[str, ...]:
        """What the march's table of operators does not allow."""
        return tuple(text for e in self.estimates.values() for text in e.violations)

    def summary(self) -> dict[str, Any]:
        """Everything but the plan's nodes, which plan.json holds."""
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
                unit: {
                    "what": "a roofline estimate from public figures, no measurement",
                    "cores": estimate.cores,
                    "seconds": estimate.seconds,
                    "figures": asdict(estimate.figures),
                    "layers": [
                        {**asdict(layer), "seconds": layer.seconds, "bound": layer.bound}
                        for layer in estimate.layers
                    ],
                    "violations": estimate.violations,
                }
                for unit, estimate in self.estimates.items()
            },
        }
