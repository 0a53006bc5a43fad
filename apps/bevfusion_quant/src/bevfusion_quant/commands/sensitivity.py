"""`bevfusion-quant sensitivity`: what each layer's rounding costs, and a plan within a budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bevfusion_quant._errors import VerificationError
from bevfusion_quant.commands._text import finished_text
from bevfusion_quant.options import (
    FrameOptions,
    Precision,
    RunOptions,
    SensitivityMetric,
    SensitivityOutput,
)

__all__ = ["Sensitivity"]


@dataclass(frozen=True, kw_only=True)
class Sensitivity(RunOptions, FrameOptions):
    """Measure what each layer's rounding costs a saved run's model; with a budget, plan precisions.

    Args:
        runs: Folder of all runs; the measurement is a new one.
        name: Its folder in it; by default sensitivity, sensitivity-2, …
        run: The folder of a run that demo or ptq wrote, for NVIDIA.
        metric: sqnr and kl (of the heat map's classes) compare with the float model and need no
            labels; mAP judges the boxes by the frames' labels.
        output: What sqnr looks at: the map before the head, or the head's heat map. By default the
            map, or where the head is quantized the heat map.
        precisions: At which each group of layers is measured alone, and which a plan may choose
            beside float: int8, int16 (activations of 16 bits), int4 (weights of 4), fp8 (E4M3).
            By default int8, of a run with --weight-bits 4 int4.
        estimate: Estimate sqnr from gradients, one pass a frame whatever the number of layers,
            without the second half. A plan is measured all the same.
        alone_only: Leave out the second half of the measurement, each group alone left in float.
        budget: time=1.2 for the best score in 1.2 times the int8 model's estimated time, or
            score=35 for the fastest plan that keeps a score; writes plan.json for ptq --plan.
        plan_rounds: Rounds of measuring plans around the estimated one, each with about as many as
            there are groups of layers; 0 for a few plans alone.
    """

    run: Path
    metric: SensitivityMetric = "sqnr"
    output: SensitivityOutput | None = None
    precisions: tuple[Precision, ...] = ()
    estimate: bool = False
    alone_only: bool = False
    budget: str | None = None
    plan_rounds: int = 2

    def execute(self, command: str) -> str:
        """Execute the command and return its output.

        Raises:
            VerificationError: No plan keeps within the budget; what was measured is kept.
        """
        from bevfusion_quant.saved_run import frames_for_run, read_model_settings
        from bevfusion_quant.sensitivity import run_sensitivity, sensitivity_text

        result = run_sensitivity(
            self.run,
            frames_for_run(self, read_model_settings(self.run)),
            metric=self.metric,
            output=self.output,
            precisions=self.precisions,
            without=not self.alone_only,
            estimate=self.estimate,
            budget=self.budget,
            plan_rounds=self.plan_rounds,
            cameras=self.cameras or None,
            **self.place(command),
        )
        text = finished_text(sensitivity_text(result.outcome), result, self)
        if result.outcome.refusal:
            raise VerificationError(result.outcome.refusal, text)
        return text
