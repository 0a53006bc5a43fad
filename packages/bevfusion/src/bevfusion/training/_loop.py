"""Steps of a training: initial weights, learning rates, single steps, progress, clean stop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from bev_data import InputError
from bev_data.metrics import aligned_table
from bevfusion.model import Detector
from bevfusion.training._head_loss import TRANSFUSION_OBJECTIVE, Objective
from bevfusion.training._prepare import CompactFrame, PreparedFrames
from bevfusion.training._samples import Augmentation, make_batch, order_of

RISE, FIRST, LAST = 0.3, 25.0, 1e4


def one_cycle(step: int, steps: int, highest: float) -> float:
    """Smith and Topin's one-cycle schedule (2018), with cosines, as torch's `OneCycleLR`.

    From highest / 25 up to `highest` in the first 30 % of the steps, then down to highest / 25 /
    10⁴ at the last step, each along half a cosine. It depends on the step alone, so a run can be
    resumed.

    Args:
        step: Number of the step, from 0.
        steps: Steps of the whole run.
        highest: The largest learning rate.

    Example:
        >>> [round(one_cycle(step, 100, 1.0), 3) for step in (0, 29, 99)]
        [0.04, 1.0, 0.0]
    """
    first = highest / FIRST
    top = RISE * steps - 1
    if step <= top:
        return _between(first, highest, step / top if top > 0 else 1.0)
    return _between(highest, first / LAST, min(1.0, (step - top) / (steps - 1 - top)))


def _between(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))


@dataclass
class StopRequest:
    """Whether a stop was requested."""

    # Set by the first signal; the second one interrupts at once.
    asked: bool = False


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Record SIGINT and SIGTERM instead of stopping in the middle of a step.

    The previous handlers are restored at the end. In a thread other than the main one Python allows
    no handlers, so no request is recorded.
    """
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        if request.asked:
            raise KeyboardInterrupt
        request.asked = True

    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                before[number] = signal.signal(number, note)
            except ValueError:  # not the main thread
                break
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


SHOWN = 20  # steps whose mean loss the progress shows


def run_steps(
    step: Callable[[int], list[float]],
    save: Callable[[int], None],
    losses: list[list[float]],
    *,
    steps: int,
    every: int,
    terms: Sequence[str],
    title: str = "train",
    quiet: bool = False,
) -> float:
    """Take the steps from `len(losses)` to `steps` − 1, and save regularly and at the end.

    torch's random state is restored afterwards: each step sets its own.

    Args:
        step: Takes one step and returns its losses.
        save: Writes a checkpoint, given the number of finished steps.
        losses: Losses of the finished steps; each step's are appended.
        steps: Steps of the whole run.
        every: Steps between two checkpoints.
        terms: Names of the losses.
        title: Title of the progress bar.
        quiet: Show no bar, save nothing and ignore stop requests: for all but the first of several
            processes that take the same steps.

    Returns:
        Seconds.

    Raises:
        InputError: SIGTERM or Ctrl-C came; the checkpoint is written.

    Example:
        >>> losses, saved = [[3.0]], []
        >>> seconds = run_steps(
        ...     lambda step: [1.0 / step], saved.append, losses,
        ...     steps=4, every=2, terms=["box"], quiet=True,
        ... )
        >>> saved, [round(loss, 2) for (loss,) in losses]
        ([2, 4], [3.0, 1.0, 0.5, 0.33])
    """
    started = time.perf_counter()
    bar = tqdm(
        total=steps, initial=len(losses), desc=title, unit="step", mininterval=1.0, disable=quiet
    )
    with torch.random.fork_rng(), stop_on_signals() as stop, bar:
        for number in range(len(losses), steps):
            losses.append(step(number))
            bar.set_postfix_str(_loss_text(losses, terms), refresh=False)
            bar.update()
            if stop.asked and not quiet:
                save(number + 1)
                raise InputError(
                    f"stopped after step {number + 1} of {steps}; the same command with "
                    "--resume goes on from there"
                )
            if (number + 1) % every == 0 and number + 1 < steps:
                save(number + 1)
    seconds = time.perf_counter() - started
    save(steps)
    return seconds


def in_parts(losses: list[list[float]]) -> list[tuple[float, ...]]:
    """The mean of each loss in up to ten equal parts of a run."""
    parts = np.array_split(np.array(losses), min(10, len(losses)))
    return [tuple(float(value) for value in part.mean(0)) for part in parts]


def losses_table(terms: Sequence[str], parts: Sequence[tuple[float, ...]]) -> str:
    """The result of `in_parts`, with the sum of the losses, as a table to print."""
    count = len(parts)
    rows = [
        (
            f"{100 * part // count} to {100 * (part + 1) // count} %",
            *(f"{value:.3f}" for value in (*means, sum(means))),
        )
        for part, means in enumerate(parts)
    ]
    return aligned_table(("part of the run", *terms, "loss"), rows)


def _loss_text(losses: list[list[float]], terms: Sequence[str]) -> str:
    means = np.mean(losses[-SHOWN:], axis=0)
    each = ", ".join(f"{name} {value:.3f}" for name, value in zip(terms, means, strict=True))
    return f"loss {means.sum():.3f} ({each})"


Trained = TypeVar("Trained", bound=Detector)
RARE = 0.1  # what the heatmap says before it has learned anything


def untrained_model(build: Callable[[], Trained], seed: int = 0) -> Trained:
    """A detector with initial weights from a seed.

    Every layer has its own default initialisation; the biases of the head's `heatmap_layers` are
    −ln((1 − p) / p) with p = 0.1, so that the many empty cells do not dominate the first steps (Lin
    et al. 2017, section 4.1). The global random generators are not changed.

    Args:
        build: Makes the model; a head is among its parts.
        seed: Seed of the weights.

    Example:
        >>> from bevfusion.model import CONFIGS, build_model
        >>> parts = ("camera", "decoder", "head")
        >>> model = untrained_model(lambda: build_model(CONFIGS["tiny"], parts))
        >>> round(float(model.head.heatmap_head[1].bias[0].detach().sigmoid()), 6)
        0.1
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
    with torch.no_grad():
        for layer in model.head.heatmap_layers:
            layer.bias.fill_(math.log(RARE / (1 - RARE)))
    return model


class DetectorTrainer:
    """Steps of AdamW on a one-cycle schedule, on randomly moved frames.

    Every random choice of a step derives from the seed and the step's number, so an interrupted run
    gives the same result. Norms and biases do not decay (Loshchilov and Hutter 2019); gradients are
    scaled down to `clip`.

    Args:
        model: The model on its training device; changed in place, in training mode.
        frames: Frames to train on.
        steps: Steps of the whole run.
        batch: Frames in each step.
        lr: Largest learning rate; see `one_cycle`.
        weight_decay: Weight decay of AdamW.
        clip: Largest norm of a step's gradient.
        seed: Seed of order, augmentation and dropout.
        augmentation: Random movements of frames.
        objective: Loss to minimise. Default: BEVFusion's.

    Attributes:
        optimizer: The optimizer; a checkpoint holds its state.
        terms: Names of the losses.
    """

    def __init__(
        self,
        model: Detector,
        frames: PreparedFrames | Sequence[CompactFrame],
        *,
        steps: int,
        batch: int,
        lr: float,
        weight_decay: float,
        clip: float,
        seed: int,
        augmentation: Augmentation,
        objective: Objective = TRANSFUSION_OBJECTIVE,
    ) -> None:
        self.model = model.train()
        self._objective, self.terms = objective, objective.terms
        self._frames, self._steps, self._batch, self._lr = frames, steps, batch, lr
        self._clip, self._seed, self._augmentation = clip, seed, augmentation
        learned = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in learned if p.ndim > 1], "weight_decay": weight_decay},
            # Neither biases nor norms decay.
            {"params": [p for p in learned if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr)

    def own(self) -> dict[str, Tensor]:
        """Further state for a checkpoint: none."""
        return {}

    def go_on(self, own: dict[str, Tensor]) -> None:
        """Restore the state of `own`."""

    def step(self, number: int) -> list[float]:
        """Take one step, counted from 0, and return its losses.

        Raises:
            FloatingPointError: A loss or gradient is not finite; the step is not taken.
        """
        chosen = order_of(self._seed, number * self._batch, self._batch, len(self._frames))
        generator = np.random.default_rng((self._seed, 2, number))
        motions = [self._augmentation.draw(generator) for _ in chosen]
        batch, targets = make_batch([self._frames[i] for i in chosen], motions, self.model)
        torch.manual_seed(int(generator.integers(2**63)))  # of dropout
        for group in self.optimizer.param_groups:
            group["lr"] = one_cycle(number, self._steps, self._lr)
        self.optimizer.zero_grad()
        outputs = self.model(*batch.to(next(self.model.parameters()).device))
        loss = self._objective.loss(outputs, targets, self.model.head.config)
        loss.total.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        values = [float(term.detach()) for term in loss]
        if not np.isfinite([*values, float(norm)]).all():
            raise FloatingPointError(
                f"step {number + 1}: the loss is {sum(values)} and its gradient's norm "
                f"{float(norm)} on frames {chosen}"
            )
        self.optimizer.step()
        return values


def stored_weights(model: nn.Module, *, half: bool) -> dict[str, Tensor]:
    """The model's state dict in the form of a weights file.

    Args:
        model: On the CPU.
        half: Store weights with more than one axis as float16. Norms, biases and the view
            transform's geometry stay: they are small, a variance may exceed 65504, and the geometry
            must be exact.
    """
    learned = {n for n, p in model.named_parameters() if p.requires_grad and p.ndim > 1}
    return {
        name: value.to(torch.float16) if half and name in learned else value.clone()
        for name, value in model.state_dict().items()
    }
