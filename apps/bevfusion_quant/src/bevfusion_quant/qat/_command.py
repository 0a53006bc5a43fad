"""`bevfusion-quant qat`: options to a run, and what is printed of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bevfusion_quant.ptq import free_name, written_text
from bevfusion_quant.qat._config import QatConfig
from bevfusion_quant.qat._run import QatResult, run_qat
from bevfusion_quant.qat._start import read_trainable
from bevfusion_quant.train import Augmentation, held_out, training_frames
from bevfusion_quant.train._loop import losses_table

if TYPE_CHECKING:
    from bevfusion_quant._options import Qat

__all__ = ["qat_from_options", "qat_text"]


def qat_from_options(options: Qat, command: str) -> str:
    """Run the sub-command and answer the text to print.

    Args:
        options: Of the command line.
        command: The command line, kept in the summary.

    Raises:
        InputError: As `run_qat`, and whatever the frame options refuse.
    """
    config = QatConfig(
        steps=options.steps,
        batch=options.batch,
        lr=options.lr,
        weight_decay=options.weight_decay,
        clip=options.clip,
        seed=options.seed,
        augmentation=Augmentation(options.flip, options.rotation, options.scale),
        freeze_after=options.freeze_after,
        learn_ranges=options.learn_ranges,
        distill=options.distill,
    )
    start = read_trainable(options.run)
    size, with_cameras = start.config["config"], "camera" in start.parts
    result = run_qat(
        options.run,
        training_frames(options, size=size, with_cameras=with_cameras),
        config,
        runs=options.runs,
        name=options.name or free_name(options.runs, "qat"),
        overwrite=options.overwrite,
        resume=options.resume,
        device=options.device,
        workers=options.workers,
        cache=options.cache,
        checkpoint_every=options.checkpoint_every,
        judge_by=held_out(options, size=size, with_cameras=with_cameras, count=options.held_out),
        cameras=options.cameras or None,
        command=command,
    )
    return qat_text(result)


def qat_text(result: QatResult) -> str:
    """The losses along the run, and how good the model is where that was asked."""
    from bev_data.metrics import accuracy_text

    table = losses_table(result.terms, result.losses)
    judged = [] if result.accuracy is None else [accuracy_text(result.accuracy)]
    parts = [
        table,
        *judged,
        f"{result.steps} steps in {result.seconds['train']:,.0f} s",
        *written_text(result.folder),
    ]
    return "\n" + "\n\n".join(parts)
