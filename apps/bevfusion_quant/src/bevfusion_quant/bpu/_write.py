"""What a run for a BPU leaves in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from bevfusion.model import CONFIGS
from bevfusion_quant.bpu._units import PREFIXES, node_labels
from bevfusion_quant.frames import FrameBatches, PoorData
from bevfusion_quant.report import write_pictures, write_run_page
from bevfusion_quant.results import BpuOutcome
from bevfusion_quant.run import Clock, RunRecord
from bevquant_quantizers.documents import write_whole

if TYPE_CHECKING:
    from bevfusion_quant.bpu._prepare import SplitUnits
    from bevfusion_quant.bpu._quantize import Forms

__all__ = ["BpuResult", "RunWriter", "folding_record", "placement_record"]


def folding_record(units: SplitUnits, change: float) -> dict[str, Any]:
    """Batch norms of the units and the convolutions that took them; `change` of the output."""
    folded, kept = [], []
    for name, unit in units.units.items():
        stem = PREFIXES[name]
        left = dict(units.fused[name].named_modules())
        modules = dict(unit.named_modules())
        for node in fx.symbolic_trace(unit).graph.nodes:
            if node.op != "call_module" or not isinstance(modules[node.target], nn.BatchNorm2d):
                continue
            conv, bn = str(node.args[0].target), str(node.target)
            if isinstance(left.get(bn), nn.BatchNorm2d):
                kept.append({"bn": stem + bn, "reason": f"{conv} did not take it"})
            else:
                folded.append({"conv": stem + conv, "bn": stem + bn, "how": "identity"})
    return {"fused": folded, "skipped": kept, "largest_relative_change": change}


def placement_record(forms: Mapping[str, Forms], outcome: BpuOutcome) -> dict[str, Any]:
    """Modules that were quantized, and what runs on the CPU in float with the reason."""
    quantized = []
    for name, form in forms.items():
        modules = dict(form.fake_graph.named_modules())
        for label in node_labels(name, form.fake_graph).values():
            module = modules.get(label.place)
            if module is not None and hasattr(module, "activation_post_process"):
                kind = type(module).__name__
                quantized.append({"path": label.path, "kind": kind, "was": label.operator})
    skipped = [{"path": node.path, "reason": node.reason} for node in outcome.on_cpu]
    return {"quantized": quantized, "shared": [], "skipped": skipped}


@dataclass(frozen=True, eq=False)
class BpuResult:
    """Where the run lies, what came out, what to look at, seconds by step, peak memory in MiB.

    `holds_model` says whether the folder holds the weights too; an evaluation's does not.
    `findings` are of the frames that calibrated.
    """

    folder: Path
    outcome: BpuOutcome
    warnings: tuple[str, ...]
    seconds: dict[str, float]
    peak_memory_mib: float
    holds_model: bool
    findings: tuple[PoorData, ...] = ()


@dataclass(eq=False)
class RunWriter:
    """Writes the files of one run.

    Args:
        folder: Where.
        outcome: What was found.
        batches: The frames.
        settings: What decides the result.
        records: `fusion` and `quantization`, as far as the run did them.
        command: The command line that repeats the run.
        warnings: What to look at.
        clock: Times the steps.
    """

    folder: Path
    outcome: BpuOutcome
    batches: FrameBatches
    settings: Mapping[str, Any]
    records: Mapping[str, Any]
    command: str
    warnings: tuple[str, ...]
    clock: Clock

    def __post_init__(self) -> None:
        self.sizes = CONFIGS[self.settings["config"]]
        self.record = RunRecord(self.folder, self.command, self.clock, ("bevquant-hybrid",))
        self.warnings += (*self.outcome.plan.warnings, *self.outcome.violations)

    def draw(self, stage: str) -> None:
        """bev.png and layers.png."""
        with self.clock.step("draw"):
            frame, judgement = self.batches.first_frame, self.outcome.comparison.judgement
            write_pictures(self.folder, self.sizes, frame, judgement, stage)

    def plan(self) -> None:
        """plan.json and partition.svg."""
        self.outcome.plan.save(self.folder / "plan.json")
        write_whole(self.folder / "partition.svg", self.outcome.picture)

    def config(self, more: Mapping[str, Any]) -> None:
        """config.json."""
        self.record.write_settings({**self.settings, **more})

    def page(self, title: str) -> None:
        """report.html."""
        judgement = self.outcome.comparison.judgement
        with self.clock.step("page"):
            write_run_page(
                self.record, title, self.sizes, self.settings, self.batches, judgement,
                records=self.records,
                bpu=self.outcome,
                accuracy=self.outcome.accuracy,
            )  # fmt: skip

    def summary(self, more: Mapping[str, Any]) -> tuple[dict[str, float], float]:
        """summary.json, and the seconds and the peak memory that it names."""
        return self.record.write_summary(
            {
                "target": "bpu",
                "branch": self.settings.get("branch"),
                "frames": self.batches.listed(),
                **more,
                **self.records,
                **self.outcome.comparison.judgement.summary(),
                "bpu": self.outcome.summary(),
                "warnings": self.warnings,
            }
        )
