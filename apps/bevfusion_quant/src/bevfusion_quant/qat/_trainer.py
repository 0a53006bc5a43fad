"""Training with fake quantization: losses, what each frame adds to a step, and the steps taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevfusion.model import Batch, BEVFusion
from bevfusion.training import (
    Augmentation,
    Motion,
    PreparedFrames,
    head_loss,
    make_batch,
    one_cycle,
    order_of,
)
from bevfusion_quant._errors import InputError
from bevfusion_quant.options import QatOptions
from bevfusion_quant.ranks import Ranks, current_ranks
from bevquant_qnn import (
    RangeFollower,
    distillation_loss,
    freeze,
    keep_within_ranges,
    learn_ranges,
    narrow_weights,
)


@dataclass(frozen=True, eq=False)
class FramePart:
    """One frame, one forward, one backward; on the CPU.

    Attributes:
        losses: float64 [terms].
        gradient: float32 [parameters], of all of them one behind the other.
        maxima: float32 [quantizers], the largest |value| that each quantizer of an activation
            saw; 0 where it saw none. Empty where ranges do not follow.
    """

    losses: Tensor
    gradient: Tensor
    maxima: Tensor


@dataclass(frozen=True, eq=False)
class StepSum:
    """Of a step's frames.

    Attributes:
        losses: float64 [terms], the mean.
        gradient: float32 [parameters], the mean.
        maxima: Each frame's.
    """

    losses: Tensor
    gradient: Tensor
    maxima: tuple[Tensor, ...]


def add_up(parts: Iterable[FramePart]) -> StepSum:
    """The mean gradient (g₀ + g₁ + …)/n, added in float32 from the first frame to the last.

    The order alone decides the bits: whoever made a frame's part, and wherever, the sum is the
    same. Frames are taken one by one, so that a generator holds one gradient and the sum.

    Raises:
        ValueError: No frames.

    Example:
        >>> import torch
        >>> from bevfusion_quant.qat import FramePart, add_up
        >>> one = FramePart(torch.tensor([2.0]), torch.tensor([1.0, 4.0]), torch.tensor([]))
        >>> two = FramePart(torch.tensor([4.0]), torch.tensor([3.0, 0.0]), torch.tensor([]))
        >>> add_up([one, two]).gradient
        tensor([2., 2.])
    """
    losses = gradient = None
    maxima = []
    for part in parts:
        losses = part.losses.clone() if losses is None else losses.add_(part.losses)
        gradient = part.gradient.clone() if gradient is None else gradient.add_(part.gradient)
        maxima.append(part.maxima)
    if losses is None or gradient is None:
        raise ValueError("add_up: there are no frames to add up")
    return StepSum(losses / len(maxima), gradient / len(maxima), tuple(maxima))


def parts_in_order(
    count: int,
    part: Callable[[int], FramePart],
    ranks: Ranks | None = None,
    *,
    by_gpu: bool = False,
) -> Iterator[FramePart]:
    """The parts of a step's frames, from the first to the last, whoever runs them.

    Every rank runs one frame, then they exchange what they have: no more gradients are held than
    there are ranks. They travel as they are, so that sums in this order have the bits of one
    process.

    Args:
        count: Frames of the step.
        part: Runs one, given its place in the step.
        ranks: The processes; those of the launcher by default.
        by_gpu: Send parts from GPU to GPU, where each process has one.

    Example:
        >>> import torch
        >>> made = [FramePart(*torch.tensor([[i], [2.0 * i], [0.0]])) for i in range(3)]
        >>> [float(found.gradient) for found in parts_in_order(3, made.__getitem__)]
        [0.0, 2.0, 4.0]
    """
    ranks = current_ranks() if ranks is None else ranks
    if ranks.alone:
        for place in range(count):
            yield part(place)
        return
    for start in range(0, count, ranks.world):
        own = {}
        for i in ranks.mine(min(ranks.world, count - start)):
            found = part(start + i)
            own = {3 * i: found.losses, 3 * i + 1: found.gradient, 3 * i + 2: found.maxima}
        tensors = list(ranks.gather(own, by_gpu=by_gpu).values())
        for i in range(0, len(tensors), 3):
            yield FramePart(*tensors[i : i + 3])


@dataclass(frozen=True, kw_only=True)
class QatConfig(QatOptions):
    """Settings of a run of `run_qat`; see `QatOptions`.

    Args:
        augmentation: How frames are moved.

    Raises:
        InputError: A setting outside its range, named as the option of the command.

    Example:
        >>> from bevfusion_quant.qat import QatConfig
        >>> QatConfig(steps=300).frozen_after
        150
    """

    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        self.check_optimizer()
        if not 0 <= self.distill < float("inf"):
            raise InputError(f"--distill {self.distill}: it must be a weight from 0 up")
        if self.freeze_after is not None and self.freeze_after < 0:
            raise InputError(
                f"--freeze-after {self.freeze_after}: it must be a number of steps from 0 up"
            )
        if self.learn_ranges and self.freeze_after == 0:
            raise InputError(
                "--learn-ranges --freeze-after 0: ranges that stand still from the first step "
                "cannot learn; leave one of the two out"
            )

    @property
    def frozen_after(self) -> int:
        """The step from which on ranges stand still."""
        return self.steps // 2 if self.freeze_after is None else self.freeze_after


class Distiller:
    """Compares the decoder's map and the heat map, in which cells mean the same in both models.

    Behind them each model looks at queries of its own choice, so their boxes cannot be compared
    one by one.

    Args:
        student: In training.
        teacher: The float model; put in eval mode.
        weight: Of the distance in the loss.
    """

    def __init__(self, student: BEVFusion, teacher: BEVFusion, weight: float) -> None:
        self._teacher, self._weight = teacher.eval(), weight
        self._maps: dict[str, Any] = {}
        self._handles = []
        for name, model in (("student", student), ("teacher", teacher)):
            decoder = model.decoder
            assert decoder is not None
            self._handles.append(decoder["neck"].register_forward_hook(self._keeper(name)))

    def loss(self, batch: Batch, outputs: dict[str, Tensor]) -> Tensor:
        """Weight · mean of Σ(q − f)²/Σf² of both maps, for what the student just answered.

        Args:
            batch: What it was called with.
            outputs: What it answered, with gradient.
        """
        with torch.no_grad():
            wanted = self._teacher(*batch)
        pairs = [(self._maps[name], found["dense_heatmap"])
                 for name, found in (("student", outputs), ("teacher", wanted))]  # fmt: skip
        self._maps.clear()
        return self._weight * distillation_loss(*pairs)

    def stop(self) -> None:
        """Keep no more maps."""
        for handle in self._handles:
            handle.remove()

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._maps[name] = output

        return keep


SURVEYED = 16  # frames whose maxima ranges are followed from
RANGE_RATE = 10.0  # a learned range moves by this times the learning rate, relative to itself
SMALLEST = 2.0**-20  # what learned ranges are kept above, as their quantizer does


class Trainer:
    """The model, its optimizer and its ranges, moved on step by step.

    Every random choice comes from the seed and the number of the frame in the run, so that neither
    a stop between two steps nor the process that runs a frame shows in the result.

    Args:
        model: Calibrated; changed in place.
        teacher: The float model to stay near, or None.
        frames: To train on.
        config: How.
        device: Where both models are.
    """

    def __init__(
        self,
        model: BEVFusion,
        teacher: BEVFusion | None,
        frames: PreparedFrames,
        config: QatConfig,
        device: torch.device,
    ) -> None:
        self.model, self._frames, self._config, self._device = model, frames, config, device
        self._distiller = None if teacher is None else Distiller(model, teacher, config.distill)
        narrow_weights(model, True)
        self._learned = learn_ranges(model) if config.learn_ranges else []
        follows = not config.learn_ranges and config.frozen_after > 0
        self._follower = RangeFollower(model) if follows else None
        ranges = {id(p) for p in self._learned}
        learning = (p for p in model.parameters() if p.requires_grad)  # geometry does not
        self._weights = [p for p in learning if id(p) not in ranges]
        self.optimizer = self._make_optimizer()
        model.train()

    @property
    def terms(self) -> tuple[str, ...]:
        """What the losses of a step are."""
        return ("heatmap", "class", "box", *(["distillation"] if self._distiller else []))

    def own(self) -> dict[str, Tensor]:
        """What must be kept beside model and optimizer to go on."""
        follower = self._follower
        return {} if follower is None else {"first": follower.first, "mean": follower.mean}

    def begin(self, own: dict[str, Tensor] | None) -> None:
        """Set what ranges are followed from: as it was kept, or from the first frames."""
        follower = self._follower
        if follower is None:
            return
        if own is not None:
            follower.first, follower.mean = own["first"], own["mean"]
            return
        count = min(SURVEYED, len(self._frames))
        self.model.eval()
        with torch.no_grad():
            maxima = []
            for index in order_of(self._config.seed, 0, count, len(self._frames)):
                batch, _ = make_batch([self._frames[index]], [Motion()], self.model)
                self.model(*batch.to(self._device))
                maxima.append(follower.take())
        follower.start(maxima)
        self.model.train()

    def step(self, number: int) -> list[float]:
        """Take one step.

        Args:
            number: From 0.

        Returns:
            The mean over the frames of each of the losses.

        Raises:
            InputError: A loss that is no number, or a frame that cannot be trained on.
        """
        config = self._config
        total = add_up(self._parts(number))
        norm = self._put(total)
        losses = [float(value) for value in total.losses]
        if not np.isfinite([*losses, norm]).all():
            raise InputError(
                f"step {number + 1}: the loss is {sum(losses)} and its gradient's norm {norm}: "
                "lower --lr or --clip and begin anew; the last checkpoint is kept"
            )
        rate = one_cycle(number, config.steps, config.lr)
        still = number >= config.frozen_after
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["pace"] * (not (still and group["range"]))
        self.optimizer.step()
        with torch.no_grad():
            for amax in self._learned:
                amax.clamp_(min=SMALLEST)
        if self._follower is not None and not still:
            self._follower.follow(total.maxima)
        return losses

    def finish(self) -> BEVFusion:
        """The model as it is written: ranges constant, on the CPU in eval mode."""
        for watcher in (self._follower, self._distiller):
            if watcher is not None:
                watcher.stop()
        model = self.model.cpu().eval()
        freeze(model)
        keep_within_ranges(model)
        narrow_weights(model, False)
        return model

    def _parts(self, number: int) -> Iterator[FramePart]:
        config = self._config
        first = number * config.batch
        chosen = order_of(config.seed, first, config.batch, len(self._frames))
        yield from parts_in_order(
            len(chosen),
            lambda place: self._part(first + place, chosen[place]),
            by_gpu=self._device.type == "cuda",
        )

    def _part(self, sample: int, index: int) -> FramePart:
        """Forward and backward of one frame.

        Args:
            sample: How many frames the run has seen before.
            index: Of the frame.
        """
        generator = np.random.default_rng((self._config.seed, 2, sample))
        motion = self._config.augmentation.draw(generator)
        batch, targets = make_batch([self._frames[index]], [motion], self.model)
        batch = batch.to(self._device)
        torch.manual_seed(int(generator.integers(2**63)))  # of dropout
        self.optimizer.zero_grad()
        outputs = self.model(*batch)
        losses = list(head_loss(outputs, targets, self.model.head.config))
        if self._distiller is not None:
            losses.append(self._distiller.loss(batch, outputs))
        torch.stack(losses).sum().backward()
        return FramePart(
            torch.stack([term.detach().double().cpu() for term in losses]),
            torch.cat([_flat_gradient(p) for p in self._parameters()]),
            torch.zeros(0) if self._follower is None else self._follower.take(),
        )

    def _put(self, total: StepSum) -> float:
        """Give each parameter its gradient; the norm of the weights' before it is clipped."""
        parameters = self._parameters()
        sizes = [p.numel() for p in parameters]
        for p, gradient in zip(parameters, torch.split(total.gradient, sizes), strict=True):
            p.grad = gradient.view_as(p).to(p.device)
        return float(nn.utils.clip_grad_norm_(self._weights, self._config.clip))

    def _parameters(self) -> list[nn.Parameter]:
        return [*self._weights, *self._learned]

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW (Loshchilov and Hutter 2019) without decay of biases and ranges.

        Adam's steps are as long as its rate, whatever the gradient, and ranges are from hundredths
        (weights) to hundreds (intensity): each gets a rate in proportion to itself.
        """
        decay = self._config.weight_decay
        common = {"pace": 1.0, "range": False}
        groups = [
            {"params": [p for p in self._weights if p.ndim > 1], "weight_decay": decay, **common},
            {"params": [p for p in self._weights if p.ndim <= 1], "weight_decay": 0.0, **common},
        ]
        for amax in self._learned:
            pace = RANGE_RATE * float(amax.detach().mean())
            groups.append({"params": [amax], "weight_decay": 0.0, "pace": pace, "range": True})
        return torch.optim.AdamW(groups, lr=self._config.lr)


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.detach().flatten().float().cpu()
