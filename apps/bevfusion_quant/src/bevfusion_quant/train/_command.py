"""`bevfusion-quant train`: options to a run, and what is printed of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bevfusion.training import Augmentation
from bevfusion_quant._frames import camera_names
from bevfusion_quant.train._config import TrainConfig
from bevfusion_quant.train._loop import losses_table
from bevfusion_quant.train._run import TrainResult, run_train
from bevfusion_quant.train._split import held_out, training_frames
from bevfusion_quant.train._weights import WEIGHTS

if TYPE_CHECKING:
    from bevfusion_quant._options import Train

__all__ = ["train_from_options"]


def train_from_options(options: Train, command: str) -> str:
    """Run the sub-command and answer the text to print.

    Args:
        options: Of the command line.
        command: The command line, kept with the weights.

    Raises:
        InputError: As `run_train`, and whatever the frame options refuse.
    """
    config = TrainConfig(
        config=options.config,
        branch=options.branch,
        steps=options.steps,
        batch=options.batch,
        lr=options.lr,
        weight_decay=options.weight_decay,
        clip=options.clip,
        seed=options.seed,
        augmentation=Augmentation(options.flip, options.rotation, options.scale),
        cameras=camera_names(options),
        start=options.start,
        half=options.half,
    )
    with_cameras = "camera" in config.parts
    result = run_train(
        training_frames(options, size=options.config, with_cameras=with_cameras),
        config,
        options.out,
        resume=options.resume,
        device=options.device,
        workers=options.workers,
        cache=options.cache,
        checkpoint_every=options.checkpoint_every,
        judge_by=held_out(
            options, size=options.config, with_cameras=with_cameras, count=options.held_out
        ),
        command=command,
    )
    return train_text(result)


def train_text(result: TrainResult) -> str:
    """The losses along the run, and how good the weights are where that was asked."""
    table = losses_table(("heatmap", "class", "box"), result.losses)
    judged = [] if result.held_out is None else [_judged(result.held_out)]
    took = f"{result.steps} steps in {result.seconds:,.0f} s"
    return "\n" + "\n\n".join([table, *judged, took, f"Weights: {result.folder / WEIGHTS}"])


def _judged(found: dict[str, Any]) -> str:
    def told(value: float | None) -> str:
        return "none" if value is None else f"{value:.3f}"

    interval = ""
    if found["interval"] is not None:
        interval = f" ({told(found['interval'][0])} to {told(found['interval'][1])})"
    without = ""
    if "mean_ap_without_pictures" in found:
        without = f", with grey pictures {told(found['mean_ap_without_pictures'])}"
    classes = ", ".join(f"{name} {told(value)}" for name, value in found["classes"].items())
    return (
        f"Held out: {found['frames']}, {found['labels']:,} labels\n"
        f"mAP {told(found['mean_ap'])}{interval}{without}, NDS {told(found['nds'])}\n{classes}"
    )
