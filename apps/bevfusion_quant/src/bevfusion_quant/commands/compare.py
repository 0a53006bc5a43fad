"""`bevfusion-quant compare`: several runs, judged by the labels of the same frames."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bevfusion_quant._errors import InputError
from bevfusion_quant.commands._text import finished_text
from bevfusion_quant.options import Backend, BootstrapOptions, FrameOptions, RunOptions

__all__ = ["Compare"]


@dataclass(frozen=True, kw_only=True)
class Compare(RunOptions, BootstrapOptions, FrameOptions):
    """Judge several runs of one float model by the labels of the same frames, in one pass.

    Args:
        resamples: Bootstrap resamples for the intervals; 0 for none.
        runs: Folder of all runs; the comparison is a new one.
        name: Its folder in it; by default compare, compare-2, …
        run: Folders of runs that demo, ptq or qat wrote from the same float weights, for NVIDIA.
        integers: Run every run's model in integers, too.
        backend: Kernels for --integers; auto takes the fastest that is exact here.
    """

    run: tuple[Path, ...]
    integers: bool = False
    backend: Backend = "auto"

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        from bevfusion_quant.compare import comparison_text, run_compare
        from bevfusion_quant.saved_run import frames_for_run, read_model_settings

        if self.backend != "auto" and not self.integers:
            raise InputError(f"--backend {self.backend} goes with --integers: add that")
        if not self.run:
            raise InputError("no runs to compare: name finished runs with --run")
        if self.points:
            raise InputError(
                "--points: files of points have no labels, which runs are compared by; give "
                "frames of a labelled data set with --dataset"
            )
        result = run_compare(
            self.run,
            frames_for_run(self, read_model_settings(self.run[0])),
            integers=self.backend if self.integers else None,
            cameras=self.cameras or None,
            bootstrap=self.bootstrap(),
            **self.place(command),
        )
        return finished_text(comparison_text(result.comparison), result, self)
