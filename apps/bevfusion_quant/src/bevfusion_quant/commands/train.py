"""`bevfusion-quant train`: labelled frames to a float detector."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bevfusion_quant.commands._text import joined
from bevfusion_quant.options import (
    DryRun,
    FrameOptions,
    ShownOptions,
    TrainingOptions,
    TrainOptions,
    config_from,
)

if TYPE_CHECKING:
    from bevfusion_quant.train import TrainResult

__all__ = ["Train"]


@dataclass(frozen=True, kw_only=True)
class Train(ShownOptions, TrainingOptions, TrainOptions, FrameOptions):
    """Train a float detector on labelled frames; a run that was stopped goes on where it was.

    Of street, training takes the seeds from 1,000,000 + --first on, 1,000 of them unless --count
    says otherwise; of pandaset, the frames numbered below 28.

    Args:
        held_out: Streets, from seed 0, to judge the weights by; of pandaset, 0 for none of the
            frames from 28 on, anything else for all.
        resume: Go on from the checkpoint in --out, or begin where there is none.
        cache: Folder of prepared frames, which runs on the same frames may share; by default in
            --out.
        out: Folder of the run: checkpoint, prepared frames, and in the end weights.safetensors.
    """

    out: Path

    def execute(self, command: str) -> str:
        """Execute the command and return its output.

        Raises:
            InputError: As `run_train`, and whatever the frame options refuse.
        """
        from bevfusion_quant.frames import camera_names
        from bevfusion_quant.train import TrainConfig, held_out, run_train, training_frames

        config = config_from(
            TrainConfig, self, augmentation=self.augmentation(), cameras=camera_names(self)
        )
        images = "camera" in config.parts
        if self.dry_run:
            raise DryRun(self.out)
        result = run_train(
            training_frames(self, size=self.config, with_cameras=images),
            config,
            self.out,
            **self.execution(),
            judge_by=held_out(self, size=self.config, with_cameras=images, count=self.held_out),
            command=command,
        )
        return str(self.out) if self.quiet else _text(result)


def _text(result: TrainResult) -> str:
    """The losses during the run, and scores if requested."""
    from bevfusion.evaluation import evaluation_text
    from bevfusion.training import losses_table
    from bevfusion_quant.train import WEIGHTS

    table = losses_table(result.terms, result.losses)
    found = result.held_out
    evaluated = [] if found is None else [f"Held out: {found['frames']}, {evaluation_text(found)}"]
    took = f"{result.steps} steps in {result.seconds:,.0f} s"
    return joined([table, *evaluated, took, f"Weights: {result.folder / WEIGHTS}"])
