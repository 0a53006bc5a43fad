"""The training run: prepared frames in, checkpoints and weights out."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from bev_data.cameras import CAMERA_NAMES
from bev_data.metrics import Bootstrap, DetectionMeter, interval_of_mean_ap, metrics_of
from bev_data.points import Frame
from bevfusion.model import CONFIGS, BEVFusion, build_model, read_state_dict
from bevfusion.training import (
    CHECKPOINT,
    Augmentation,
    FrameSource,
    PreparedFrames,
    check_identity,
    head_loss,
    identity_of,
    in_parts,
    make_batch,
    one_cycle,
    order_of,
    prepare_frames,
    read_checkpoint,
    restore,
    run_steps,
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


def write_weights(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write safetensors whole, with `about` as JSON in the file's metadata."""
    write_tensors(path, tensors, {_KEY: json.dumps(about)})


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


RARE = 0.1  # what the heatmap says before it has learned anything


def first_model(config: TrainConfig) -> BEVFusion:
    """A model with the seed's weights, or with those of `config.start` where they fit.

    Every layer has its own default initialisation; the heatmap's bias is −ln((1 − p) / p) with p =
    0.1, so that the many empty cells do not rule the first steps (Lin et al. 2017, section 4.1).
    The global random generators are left as they were.

    Raises:
        InputError: No entry of `config.start` fits the model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_model(CONFIGS[config.config], config.parts)
    with torch.no_grad():
        bias = math.log(RARE / (1 - RARE))
        model.head.heatmap_head[1].bias.fill_(bias)
        model.head.prediction_heads[0].heatmap[1].bias.fill_(bias)
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


TERMS = ("heatmap", "class", "box")


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
    optimizer = _optimizer(model, config)
    losses: list[list[float]] = []
    if begun is not None:
        restore(begun, model, optimizer)
        losses = begun.losses.tolist()
        LOG.info("going on after step %d of %d", begun.step, config.steps)

    def save(step: int) -> None:
        write_checkpoint(checkpoint, model, optimizer, step, losses, identity)

    first = len(losses)
    model.train()
    seconds = run_steps(
        lambda step: _step(step, frames, model, optimizer, config, target),
        save,
        losses,
        steps=config.steps,
        every=checkpoint_every,
        terms=TERMS,
    )
    model = model.cpu().eval()
    tensors = stored_weights(model, half=config.half)
    model.load_state_dict(tensors)
    held_out = None
    if judge_by is not None:
        held_out = {"frames": judge_by.describe, **judge_detector(model, judge_by.open(), config)}
    about = {"command": command, **identity, "held_out": held_out}
    write_weights(out / WEIGHTS, tensors, about)
    return TrainResult(out, in_parts(losses), seconds, config.steps - first, held_out)


def _step(
    step: int,
    frames: PreparedFrames,
    model: BEVFusion,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    device: torch.device,
) -> list[float]:
    """One step of the optimizer; the three losses."""
    chosen = order_of(config.seed, step * config.batch, config.batch, len(frames))
    generator = np.random.default_rng((config.seed, 2, step))
    motions = [config.augmentation.draw(generator) for _ in chosen]
    batch, targets = make_batch([frames[i] for i in chosen], motions, model)
    torch.manual_seed(int(generator.integers(2**63)))  # of dropout
    for group in optimizer.param_groups:
        group["lr"] = one_cycle(step, config.steps, config.lr)
    optimizer.zero_grad()
    outputs = model(*batch.to(device))
    loss = head_loss(outputs, targets, model.head.config)
    loss.total.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    values = [float(term.detach()) for term in loss]
    if not np.isfinite([*values, float(norm)]).all():
        raise InputError(
            f"step {step + 1}: the loss is {sum(values)} and its gradient's norm {float(norm)} on "
            f"frames {chosen}: lower --lr or --clip and begin anew; the last checkpoint is kept"
        )
    optimizer.step()
    return values


def _optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) without decay of norms and biases."""
    learned = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learned if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in learned if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr)


def _refuse_other_runs(out: Path, resume: bool) -> None:
    if resume or not out.is_dir():
        return
    if (out / CHECKPOINT).exists() or (out / WEIGHTS).exists():
        raise InputError(f"{out} holds a run already: go on with --resume, or choose another --out")
