"""What a run for a BPU leaves in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bevfusion.model import CONFIGS
from bevfusion_quant.frames import FrameBatches, PoorData
from bevfusion_quant.report import write_pictures, write_run_page
from bevfusion_quant.results import BpuOutcome
from bevfusion_quant.run import (
    Clock,
    RunRecord,
)
from bevquant_quantizers.documents import write_whole

__all__ = ["BpuResult", "RunWriter"]


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
