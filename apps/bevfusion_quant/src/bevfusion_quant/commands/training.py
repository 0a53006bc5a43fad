"""Commands that train: `train` a float detector on labelled frames, `qat` a quantized run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bevfusion_quant.commands._text import joined, shown
from bevfusion_quant.options import (
    DryRun,
    FrameOptions,
    QatOptions,
    RunOptions,
    ShownOptions,
    TrainingOptions,
    TrainOptions,
    config_from,
)

if TYPE_CHECKING:
    from bevfusion_quant.qat import QatResult
    from bevfusion_quant.train import TrainResult


@dataclass(frozen=True, kw_only=True)
class Train(ShownOptions, TrainingOptions, TrainOptions, FrameOptions):
    """Train a float detector on labelled frames; --resume continues a stopped run.

    Training frames of street are the seeds from 1,000,000 + --first on, by default 1,000; of
    pandaset, the frames before 28.

    Args:
        resume: Continue from the checkpoint in --out, if there is one.
        cache: Folder of prepared frames; runs on the same frames may share it. Default: in --out.
        out: Folder of the run: checkpoint, prepared frames, at the end weights.safetensors.
    """

    out: Path

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
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
        return str(self.out) if self.quiet else _trained_text(result)


def _trained_text(result: TrainResult) -> str:
    from bevfusion.evaluation import evaluation_text
    from bevfusion.training import losses_table
    from bevfusion_quant.train import WEIGHTS

    table = losses_table(result.terms, result.losses)
    found = result.held_out
    evaluated = [] if found is None else [f"Held out: {found['frames']}, {evaluation_text(found)}"]
    took = f"{result.steps} steps in {result.seconds:,.0f} s"
    return joined([table, *evaluated, took, f"Weights: {result.folder / WEIGHTS}"])


@dataclass(frozen=True, kw_only=True)
class Qat(RunOptions, TrainingOptions, QatOptions, FrameOptions):
    """Train a saved run's quantized model on labelled frames; the run stays unchanged.

    Training frames are those of `train`: of street, the seeds from 1,000,000 + --first on, by
    default 1,000; of pandaset, the frames before 28.

    Args:
        resume: Continue from the checkpoint of a stopped run, if there is one.
        cache: Folder of prepared frames; runs on the same frames, and `train` with cameras, may
            share it. Default: NAME.training in --runs.
        runs: Folder of all runs; the trained run is a new one.
        name: Its folder in it; by default qat, qat-2, …
        overwrite: Replace an earlier run of that name, or its checkpoint.
        run: The folder of a run that ptq, demo or qat wrote, with a head, for NVIDIA.
    """

    run: Path

    def execute(self, command: str) -> str:
        """Execute the command and return its output."""
        from bevfusion_quant.qat import QatConfig, read_trainable, run_qat
        from bevfusion_quant.train import held_out, training_frames

        config = config_from(QatConfig, self, augmentation=self.augmentation())
        start = read_trainable(self.run)
        size, images = start.config, "camera" in start.parts
        result = run_qat(
            self.run,
            training_frames(self, size=size, with_cameras=images),
            config,
            **self.place(command),
            **self.execution(),
            judge_by=held_out(self, size=size, with_cameras=images, count=self.held_out),
            cameras=self.cameras or None,
        )
        text = _quantized_text(result)
        quiet = self.quiet or self.json
        return shown(result.folder, self, "") if quiet else text


def _quantized_text(result: QatResult) -> str:
    from bev_data.metrics import accuracy_text
    from bevfusion.training import losses_table
    from bevfusion_quant.run import written_text

    table = losses_table(result.terms, result.losses)
    evaluated = [] if result.accuracy is None else [accuracy_text(result.accuracy)]
    took = f"{result.steps} steps in {result.seconds['train']:,.0f} s"
    return joined([table, *evaluated, took, *written_text(result.folder)])
