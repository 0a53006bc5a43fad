"""The training run: prepared frames in, checkpoints and weights out."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from bevfusion.training import head_loss, make_batch, one_cycle, order_of
from bevfusion_quant._errors import InputError
from bevfusion_quant.train._checkpoint import (
    CHECKPOINT,
    read_checkpoint,
    restore,
    write_checkpoint,
)
from bevfusion_quant.train._device import moved, usable_device
from bevfusion_quant.train._identity import check_identity, identity_of
from bevfusion_quant.train._loop import in_parts, run_steps
from bevfusion_quant.train._prepare import prepare_frames
from bevfusion_quant.train._start import first_model
from bevfusion_quant.train._weights import WEIGHTS, stored_weights, write_weights

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion
    from bevfusion_quant.train._config import TrainConfig
    from bevfusion_quant.train._prepare import PreparedFrames
    from bevfusion_quant.train._split import FrameSource

__all__ = ["TrainResult", "run_train"]

LOG = logging.getLogger(__name__)
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
        from bevfusion_quant.train._judge import judge_detector

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
    outputs = model(*moved(batch, device))
    loss = head_loss(outputs, targets, model.head.config)
    loss.total.backward()  # type: ignore[no-untyped-call]
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
