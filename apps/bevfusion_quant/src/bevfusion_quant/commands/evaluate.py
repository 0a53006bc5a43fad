"""`bevfusion-quant evaluate` and `simulate`: a finished run on other frames."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bevfusion_quant._errors import InputError
from bevfusion_quant.commands._text import bpu_run_text, run_text
from bevfusion_quant.options import Backend, BootstrapOptions, FrameOptions, RunOptions

__all__ = ["Evaluate", "Simulate"]


@dataclass(frozen=True, kw_only=True)
class Evaluate(RunOptions, BootstrapOptions, FrameOptions):
    """Compare a saved run's float and quantized model on other frames; the run stays as it is.

    Args:
        run: The folder of a run that demo or ptq wrote.
        runs: Folder of all runs; the evaluation is a new one.
        name: The evaluation's folder in it; by default evaluate, evaluate-2, …
    """

    run: Path

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        return self._execute(command, integers=None)

    def _execute(
        self, command: str, *, integers: Backend | None, layer_frames: int | None = None
    ) -> str:
        from bevfusion_quant.ptq import run_evaluate
        from bevfusion_quant.saved_run import frames_for_run, read_model_settings

        settings = read_model_settings(self.run)
        frames = frames_for_run(self, settings)
        cameras, bootstrap = self.cameras or None, self.bootstrap()
        if not settings.for_bpu:
            result = run_evaluate(
                self.run,
                frames,
                cameras=cameras,
                integers=integers,
                layer_frames=layer_frames,
                bootstrap=bootstrap,
                **self.place(command),
            )
            return run_text(result, self)

        from bevfusion_quant.bpu import run_bpu_evaluate
        from bevquant_quantizers.ranks import current_ranks

        if not current_ranks().alone:
            raise InputError(
                f"{self.run} is a run for a BPU, which is judged in one process: start it "
                "without torchrun or srun"
            )
        if integers not in (None, "auto"):
            raise InputError(
                f"--backend {integers}: the integers of a run for a BPU take the kernels "
                "that fit them; leave it out"
            )
        if layer_frames is not None:
            raise InputError(
                f"--layer-frames {layer_frames}: the forms of a run for a BPU are compared on "
                "every frame; leave it out"
            )
        return bpu_run_text(
            run_bpu_evaluate(
                self.run, frames, cameras=cameras, bootstrap=bootstrap, **self.place(command)
            ),
            self,
        )


@dataclass(frozen=True, kw_only=True)
class Simulate(Evaluate):
    """Run a saved run's model in integer arithmetic on frames, beside float and fake-quantized.

    Args:
        name: The simulation's folder in --runs; by default simulate, simulate-2, …
        backend: Kernels to run on; auto takes the fastest that is exact here.
        layer_frames: On how many frames, from the first on, each operation is compared with float
            and fake-quantized; all by default. A frame without takes half of the time.
    """

    backend: Backend = "auto"
    layer_frames: int | None = None

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        return self._execute(command, integers=self.backend, layer_frames=self.layer_frames)
