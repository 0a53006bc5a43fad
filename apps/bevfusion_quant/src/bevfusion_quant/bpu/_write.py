"""What a run for a BPU leaves in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bevfusion.model import CONFIGS
from bevfusion_quant.bpu._outcome import BpuOutcome
from bevfusion_quant.ptq import FrameBatches, PoorData
from bevfusion_quant.ptq._clock import Clock
from bevfusion_quant.ptq._page import write_page, write_pictures
from bevfusion_quant.ptq._run_folder import CONFIG_FILE, RUN_FORMAT, RUN_VERSIONS
from bevfusion_quant.ptq._summary import peak_memory_mib, versions, write_json
from bevquant_quantizers.documents import write_whole

__all__ = ["BpuResult", "RunWriter"]

HEAD = {"format": RUN_FORMAT, "version": RUN_VERSIONS[-1]}


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
        write_json(self.folder / CONFIG_FILE, {**HEAD, **self.settings, **more})

    def page(self, title: str) -> None:
        """report.html."""
        with self.clock.step("page"):
            write_page(
                self.folder / "report.html",
                title=title,
                command=self.command,
                config=self.sizes,
                settings={**self.settings, "threads": torch.get_num_threads()},
                frame=self.batches.first_frame,
                cameras=self.batches.used_cameras(self.batches.first_frame),
                frames=[frame for _, (frame, _) in sorted(self.batches.names.items())],
                judgement=self.outcome.comparison.judgement,
                records=self.records,
                seconds=self.clock.seconds(),
                peak_memory_mib=peak_memory_mib(),
                bpu=self.outcome,
                accuracy=self.outcome.accuracy,
            )

    def summary(self, more: Mapping[str, Any]) -> tuple[dict[str, float], float]:
        """summary.json, and the seconds and the peak memory that it names."""
        seconds, peak = self.clock.seconds(), round(peak_memory_mib(), 1)
        frames = [
            {"name": frame, "size": size} for _, (frame, size) in sorted(self.batches.names.items())
        ]
        content = {
            **HEAD,
            "target": "bpu",
            "command": self.command,
            "versions": versions("bevquant-hybrid"),
            "threads": torch.get_num_threads(),
            "branch": self.settings.get("branch"),
            "frames": frames,
            **more,
            **self.records,
            **self.outcome.comparison.judgement.summary(),
            "bpu": self.outcome.summary(),
            "warnings": self.warnings,
            "seconds": seconds,
            "peak_memory_mib": peak,
        }
        write_json(self.folder / "summary.json", content)
        return seconds, peak
