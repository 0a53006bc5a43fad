"""Settings of training, in float and with quantizers, and of its execution."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bevfusion_quant._errors import InputError
from bevfusion_quant.options._choices import ConfigName, ModelName, TrainedBranch

if TYPE_CHECKING:
    from bevfusion.training import Augmentation


_EXECUTION = ("resume", "device", "workers", "cache", "checkpoint_every")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Augmentation, and how a training run goes about it, which does not change its result.

    Args:
        flip: Whether frames are mirrored along x and y, each in half of the draws.
        rotation: Turn frames by up to this angle [rad].
        scale: Scale frames by up to this share.
        held_out: Number of streets, from seed 0 on, for the evaluation; of pandaset, 0 for none,
            other numbers for all frames from 28 on.
        resume: Continue from the checkpoint, if there is one.
        device: Device to train on, such as cpu or cuda.
        workers: Processes that prepare frames ahead.
        cache: Folder of prepared frames, which runs on the same frames may share.
        checkpoint_every: Steps between checkpoints.
    """

    flip: bool = True
    rotation: float = 0.2
    scale: float = 0.05
    held_out: int = 100
    resume: bool = False
    device: str = "cpu"
    workers: int = 1
    cache: Path | None = None
    checkpoint_every: int = 100

    def augmentation(self) -> Augmentation:
        """The augmentation object of the training."""
        from bevfusion.training import Augmentation

        return Augmentation(self.flip, self.rotation, self.scale)

    def execution(self) -> dict[str, Any]:
        """Keywords of `run_train` and `run_qat` that do not change the result."""
        return {name: getattr(self, name) for name in _EXECUTION}


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW on a one-cycle schedule.

    Args:
        steps: Steps of the optimizer.
        batch: Frames in each step.
        lr: Largest learning rate of the one-cycle schedule.
        weight_decay: Weight decay of AdamW.
        clip: Largest norm of the gradients; longer ones are scaled.
        seed: Seed of weights, order, augmentation and dropout.
    """

    steps: int = 2000
    batch: int = 4
    lr: float = 2e-3
    weight_decay: float = 0.01
    clip: float = 10.0
    seed: int = 0

    def check_optimizer(self) -> None:
        """Refuse settings outside their range.

        Raises:
            InputError: A setting is outside its range; named as the command's option.
        """
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} {getattr(self, name)}: it must be at least 1")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"--{name} {getattr(self, name)}: it must be above 0")
        if not 0 <= self.weight_decay < 1:
            raise InputError(f"--weight-decay {self.weight_decay}: it must be from 0 to 1")
        if self.seed < 0:
            raise InputError(f"--seed {self.seed}: it must not be negative")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(OptimizerOptions):
    """A float detector.

    Args:
        model: The detector: bevfusion, centerpoint or centerpoint-pillars.
        config: Sizes of the model, or FILE: the config.json or the folder of a run, whose settings
            become the defaults.
        branch: Sensors of bevfusion: lidar, camera (with the LiDAR's depth, as mit-bevfusion's view
            transform reads it), or all.
        start: Weights to start from; entries that do not fit are skipped.
        half: Store weights as float16, except those of norms.
    """

    model: ModelName = "bevfusion"
    config: ConfigName = "tiny"
    branch: TrainedBranch = "all"
    start: Path | None = None
    half: bool = False


@dataclass(frozen=True, kw_only=True)
class QatOptions(OptimizerOptions):
    """A quantized model, of which a run gives everything else.

    Args:
        batch: Frames in each step, run one by one.
        seed: Seed of order, augmentation and dropout.
        freeze_after: Steps after which all ranges stay fixed; 0 keeps the calibrated ranges.
            Default: half of the steps.
        learn_ranges: Learn the ranges by gradient (LSQ); otherwise they follow the largest values.
        train_float: Train layers left in float too, such as a head that is not quantized.
        distill: Factor in the loss of the distance to the float model's decoder map and heat map; 0
            for none.
    """

    steps: int = 200
    batch: int = 2
    lr: float = 3e-4
    freeze_after: int | None = None
    learn_ranges: bool = True
    train_float: bool = False
    distill: float = 5.0
