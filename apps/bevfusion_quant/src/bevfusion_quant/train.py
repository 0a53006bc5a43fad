"""Training of a detector: from prepared frames to checkpoints and weights; it can be resumed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bev_data.cameras import CAMERA_NAMES
from bevfusion import training
from bevfusion.detectors import DETECTORS, build_detector, is_foreign
from bevfusion.evaluation import evaluate_detector
from bevfusion.model import Detector, Sizes, read_state_dict
from bevfusion.training import *  # noqa: F403
from bevfusion.training import Augmentation, FrameSource
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import FIRST_TRAINING_SEED, FrameBatches, held_out, training_frames
from bevfusion_quant.options import Branch, TrainOptions
from bevfusion_quant.stages import built_parts, sizes_of
from bevquant_quantizers.documents import write_tensors
from bevquant_quantizers.ranks import current_ranks

__all__ = [
    "FIRST_TRAINING_SEED",
    "TRAINED_BRANCHES",
    "WEIGHTS",
    "TrainConfig",
    "TrainResult",
    "held_out",
    "run_train",
    "training_frames",
    "usable_device",
    *training.__all__,
]

TRAINED_BRANCHES: dict[str, Branch] = {
    "lidar": "lidar-detector",
    "camera": "camera-detector",
    "all": "all",
}
"""The detector that each branch means: it needs decoder and head."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainOptions):
    """Settings that decide the trained weights, apart from the frames; see `TrainOptions`.

    Args:
        augmentation: Random movements of frames.
        cameras: Names of the cameras to use, in this order.

    Raises:
        InputError: A setting is outside its range; named as the command's option.
    """

    augmentation: Augmentation = field(default_factory=Augmentation)
    cameras: tuple[str, ...] = CAMERA_NAMES

    def __post_init__(self) -> None:
        self.check_optimizer()
        if self.branch not in TRAINED_BRANCHES:
            raise InputError(f"--branch {self.branch}: one of {', '.join(TRAINED_BRANCHES)}")
        if is_foreign(self.model):
            raise InputError(
                f"--model {self.model}: train takes the detectors that come with bevfusion; train "
                "yours in its own code, and give ptq the checkpoint with --weights"
            )
        _ = self.sizes, self.parts

    @property
    def sizes(self) -> Sizes:
        """Sizes of the model."""
        return sizes_of(self.model, self.config)

    @property
    def parts(self) -> tuple[str, ...]:
        """The built parts of the model."""
        return built_parts(TRAINED_BRANCHES[self.branch], self.model)

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the network's images; None without cameras."""
        sizes: Any = self.sizes
        return sizes.camera.image_size if "camera" in self.parts else None


WEIGHTS = "weights.safetensors"
_KEY = "bevfusion-quant"


LOG = logging.getLogger(__name__)


def usable_device(name: str) -> torch.device:
    """Check a device; "cuda" is each rank's own GPU.

    Raises:
        InputError: torch does not know the device, or cannot use it here.
    """
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None and current_ranks().gpu is not None:
            device = torch.device("cuda", current_ranks().gpu)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"--device {name} cannot be used here ({str(error).splitlines()[0]}): use cpu, or "
            "install a torch that drives the device"
        ) from error
    return device


@contextmanager
def refusing_divergence() -> Iterator[None]:
    """Turn a loss that is not finite into an error with a remedy."""
    try:
        yield
    except FloatingPointError as error:
        raise InputError(
            f"{error}: lower --lr or --clip and begin anew; the last checkpoint is kept"
        ) from error


def first_model(config: TrainConfig) -> Detector:
    """A model with the seed's weights, or with those of `config.start` that fit."""
    model = training.untrained_model(
        lambda: build_detector(config.sizes, config.parts), config.seed
    )
    if config.start is not None:
        own = model.state_dict()
        given = read_state_dict(config.start)
        fits = {n: t for n, t in given.items() if n in own and t.shape == own[n].shape}
        if not fits:
            raise InputError(
                f"{config.start}: no entry fits the model of config {config.config!r}, branch "
                f"{config.branch!r}; start from weights that `train` wrote with this --config"
            )
        model.load_state_dict(fits, strict=False)
        LOG.info("%d of %d entries from %s", len(fits), len(own), config.start)
    return model


_TRAINED_BY = ("steps", "batch", "lr", "weight_decay", "clip", "seed", "augmentation")


@dataclass(frozen=True)
class TrainResult:
    """Folder and course of a training run.

    Attributes:
        folder: Holds `weights.safetensors` and the last checkpoint.
        losses: Mean of each loss in up to ten equal parts of the run.
        terms: Names of the losses.
        seconds: Seconds of this process's steps.
        steps: Steps of this process.
        held_out: Scores of the stored weights on frames that training never saw; None without such
            frames.
    """

    folder: Path
    losses: list[tuple[float, ...]]
    terms: tuple[str, ...]
    seconds: float
    steps: int
    held_out: dict[str, Any] | None


def run_train(
    source: FrameSource,
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    device: str = "cpu",
    workers: int = 1,
    cache: Path | None = None,
    checkpoint_every: int = 100,
    judge_by: FrameSource | None = None,
    command: str = "",
) -> TrainResult:
    """Train a detector, or resume its training, and write `out/weights.safetensors`.

    Every random choice of a step derives from the seed and the step's number. On the same machine
    with the same number of threads, a resumed run therefore gives the weights of an uninterrupted
    one, bit for bit. SIGTERM and Ctrl-C stop between two steps and write a checkpoint.

    Args:
        source: Frames to train on.
        config: Settings.
        out: Folder of the run.
        resume: Continue from the checkpoint in `out`, or start where there is none.
        device: torch's name, such as "cpu" or "cuda".
        workers: Processes that prepare frames ahead; 0 prepares them in this process.
        cache: Folder of the prepared frames. Default: `out/frames`.
        checkpoint_every: Steps between checkpoints.
        judge_by: Frames for nuScenes' metrics at the end.
        command: The command line that repeats this run, stored with the weights.

    Raises:
        InputError: The input is wrong, a loss is not finite, or a stop was requested; the message
            names the step.
    """
    if checkpoint_every < 1:
        raise InputError(f"--checkpoint-every {checkpoint_every}: it must be at least 1")
    target = usable_device(device)
    identity = training.identity_of(source, config)
    checkpoint = out / training.CHECKPOINT
    if out.is_file():
        raise InputError(f"--out {out}: it is a file, not a folder; choose another")
    if not resume and any((out / name).exists() for name in (training.CHECKPOINT, WEIGHTS)):
        raise InputError(f"{out} holds a run already: go on with --resume, or choose another --out")
    begun = training.begun_before(checkpoint, identity, "--out") if resume else None
    out.mkdir(parents=True, exist_ok=True)
    frames = training.prepare_frames(source, config, cache or out / "frames", workers=workers)
    model = first_model(config).to(target)
    objective = DETECTORS[config.model].objective
    assert objective is not None  # a detector in other code was refused
    trainer = training.DetectorTrainer(
        model, frames, objective=objective, **{name: getattr(config, name) for name in _TRAINED_BY}
    )
    started = time.perf_counter()
    with refusing_divergence():
        losses, first = training.take_steps(
            trainer, checkpoint, identity, begun, steps=config.steps, every=checkpoint_every
        )
    seconds = time.perf_counter() - started
    model = model.cpu().eval()
    tensors = training.stored_weights(model, half=config.half)
    model.load_state_dict(tensors)
    held_out = None
    if judge_by is not None:
        batches = FrameBatches(judge_by.open(), config.sizes, model, config.cameras)
        held_out = {"frames": judge_by.describe, **evaluate_detector(model, batches)}
    about = {"command": command, **identity, "held_out": held_out}
    write_tensors(out / WEIGHTS, tensors, {_KEY: json.dumps(about)})
    steps = config.steps - first
    return TrainResult(out, training.in_parts(losses), trainer.terms, seconds, steps, held_out)
