"""The training run: prepared frames in, checkpoints and weights out."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from bev_data.cameras import CAMERA_NAMES
from bev_data.metrics import Bootstrap, DetectionMeter, interval_of_mean_ap, metrics_of
from bev_data.points import Frame
from bevfusion.model import CONFIGS, BEVFusion, read_state_dict
from bevfusion.training import (
    CHECKPOINT,
    Augmentation,
    DetectorTrainer,
    FrameSource,
    check_identity,
    identity_of,
    in_parts,
    prepare_frames,
    read_checkpoint,
    restore,
    run_steps,
    untrained_model,
    write_checkpoint,
)
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.options import TrainOptions
from bevquant_quantizers.documents import write_tensors
from bevquant_quantizers.ranks import current_ranks

TRAINED_BRANCHES: dict[str, tuple[str, ...]] = {
    "lidar": ("lidar", "decoder", "head"),
    "camera": ("camera", "decoder", "head"),
    "all": ("camera", "lidar", "fuser", "decoder", "head"),
}
"""The parts that are built for each branch: a detector needs decoder and head."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainOptions):
    """Everything that decides the trained weights, the frames apart; see `TrainOptions`.

    Args:
        augmentation: How frames are moved.
        cameras: Names of the cameras to use, in this order.

    Raises:
        InputError: A setting outside its range, named as the option of the command.
    """

    augmentation: Augmentation = field(default_factory=Augmentation)
    cameras: tuple[str, ...] = CAMERA_NAMES

    def __post_init__(self) -> None:
        self.check_optimizer()
        for name, known in (("config", CONFIGS), ("branch", TRAINED_BRANCHES)):
            if getattr(self, name) not in known:
                raise InputError(f"--{name} {getattr(self, name)}: one of {', '.join(known)}")

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the model that are built."""
        return TRAINED_BRANCHES[self.branch]

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the network's images; None where it reads none."""
        return CONFIGS[self.config].camera.image_size if "camera" in self.parts else None


WEIGHTS = "weights.safetensors"
_KEY = "bevfusion-quant"


def stored_weights(model: nn.Module, *, half: bool) -> dict[str, Tensor]:
    """The model's state dict as it is stored.

    Args:
        model: On the CPU.
        half: Weights with more than one axis become float16. Norms, biases and the view transform's
            geometry stay as they are: they are few, a variance may exceed 65504, and the geometry
            must be exact.
    """
    learned = {n for n, p in model.named_parameters() if p.requires_grad and p.ndim > 1}
    return {
        name: value.to(torch.float16) if half and name in learned else value.clone()
        for name, value in model.state_dict().items()
    }


LOG = logging.getLogger(__name__)


def usable_device(name: str) -> torch.device:
    """The device, tried; "cuda" is each rank's own GPU, where it has one.

    Raises:
        InputError: torch does not know it, or cannot use it here.
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


def first_model(config: TrainConfig) -> BEVFusion:
    """A model with the seed's weights, or with those of `config.start` where they fit.

    Raises:
        InputError: No entry of `config.start` fits the model.
    """
    model = untrained_model(CONFIGS[config.config], config.parts, config.seed)
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


def judge_detector(
    model: BEVFusion, frames: Sequence[Frame], config: TrainConfig
) -> dict[str, Any]:
    """NuScenes' metrics of a float model, frame by frame in little memory.

    Args:
        model: In eval mode, on the CPU.
        frames: Labelled.
        config: Of the run.

    Returns:
        JSON: labels, mean_ap, interval (95 %, over frames), nds, and mean_ap by class; of a fused
        model also what it finds with grey pictures (mean_ap_without_pictures), which tells what
        the cameras add to the LiDAR in this very model.

    Raises:
        InputError: A frame has no labels.
    """
    sizes = CONFIGS[config.config]
    batches = FrameBatches(frames, sizes, model, config.cameras)
    meter, blind = (DetectionMeter(sizes.head.classes) for _ in range(2))
    fused = {"camera", "lidar"} <= set(model.parts)
    with torch.no_grad():
        for index in tqdm(range(len(frames)), desc="held out"):
            batch = batches[index]
            labels = batches.frame_labels(index)
            if labels is None:
                raise InputError(f"{batches.names[index][0]}: no labels to judge by")
            meter.add(model.head.decode(model(*batch))[0], labels)
            if fused and batch.images is not None:
                grey = batch._replace(images=torch.zeros_like(batch.images))
                blind.add(model.head.decode(model(*grey))[0], labels)
    interval = interval_of_mean_ap(meter, Bootstrap())
    metrics = metrics_of(meter, interval)
    without = {"mean_ap_without_pictures": metrics_of(blind).mean_ap} if fused else {}
    return {
        "count": metrics.frames,
        "labels": metrics.labels,
        "mean_ap": metrics.mean_ap,
        "interval": None if interval is None else [interval.low, interval.high],
        **without,
        "nds": metrics.nds,
        "classes": {row.name: row.mean_ap for row in metrics.classes},
    }


_TRAINED_BY = ("steps", "batch", "lr", "weight_decay", "clip", "seed", "augmentation")


@dataclass(frozen=True)
class TrainResult:
    """Where the run lies, and how it went.

    Attributes:
        folder: With `weights.safetensors` and the last checkpoint.
        losses: Mean heatmap, class and box loss in up to ten equal parts of the run.
        seconds: Of this process's steps.
        steps: That this process took.
        held_out: What the weights, as stored, do on frames never trained on; None without such.
    """

    folder: Path
    losses: list[tuple[float, ...]]
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
    """Train a detector, or go on with one, and write `out/weights.safetensors`.

    Every random choice of a step comes from the seed and the step's number, so a run that was
    killed and goes on from its checkpoint ends with the weights of one that was not, bit for bit,
    on the same machine with the same number of threads. SIGTERM and Ctrl-C end it between two
    steps with a checkpoint.

    Args:
        source: Frames to train on.
        config: What to do.
        out: Folder of the run.
        resume: Go on from the checkpoint in `out`, or begin where there is none.
        device: torch's name, such as "cpu" or "cuda".
        workers: Processes that prepare frames ahead; 0 prepares them in this one.
        cache: Folder of the prepared frames; `out/frames` by default.
        checkpoint_every: Steps between checkpoints.
        judge_by: Frames of which nuScenes' metrics are told at the end.
        command: The command line that repeats this run, kept with the weights.

    Raises:
        InputError: Whatever is wrong with the input, a loss that is no number, or a request to
            stop, which names the step reached.
    """
    if checkpoint_every < 1:
        raise InputError(f"--checkpoint-every {checkpoint_every}: it must be at least 1")
    target = usable_device(device)
    identity = identity_of(source, config)
    checkpoint = out / CHECKPOINT
    _refuse_other_runs(out, resume)
    begun = read_checkpoint(checkpoint) if resume and checkpoint.is_file() else None
    if begun is not None:
        check_identity(checkpoint, begun, identity, "--out")
    out.mkdir(parents=True, exist_ok=True)
    frames = prepare_frames(source, config, cache or out / "frames", workers=workers)
    model = first_model(config).to(target)
    trainer = DetectorTrainer(
        model, frames, **{name: getattr(config, name) for name in _TRAINED_BY}
    )
    losses: list[list[float]] = []
    if begun is not None:
        restore(begun, model, trainer.optimizer)
        losses = begun.losses.tolist()
        LOG.info("going on after step %d of %d", begun.step, config.steps)

    def save(step: int) -> None:
        write_checkpoint(checkpoint, model, trainer.optimizer, step, losses, identity)

    first = len(losses)
    try:
        seconds = run_steps(
            trainer.step, save, losses,
            steps=config.steps,
            every=checkpoint_every,
            terms=trainer.terms,
        )  # fmt: skip
    except FloatingPointError as error:
        raise InputError(
            f"{error}: lower --lr or --clip and begin anew; the last checkpoint is kept"
        ) from error
    model = model.cpu().eval()
    tensors = stored_weights(model, half=config.half)
    model.load_state_dict(tensors)
    held_out = None
    if judge_by is not None:
        held_out = {"frames": judge_by.describe, **judge_detector(model, judge_by.open(), config)}
    about = {"command": command, **identity, "held_out": held_out}
    write_tensors(out / WEIGHTS, tensors, {_KEY: json.dumps(about)})
    return TrainResult(out, in_parts(losses), seconds, config.steps - first, held_out)


def _refuse_other_runs(out: Path, resume: bool) -> None:
    if resume or not out.is_dir():
        return
    if (out / CHECKPOINT).exists() or (out / WEIGHTS).exists():
        raise InputError(f"{out} holds a run already: go on with --resume, or choose another --out")
