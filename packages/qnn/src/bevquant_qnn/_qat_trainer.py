"""Training with fake quantizers on: weights, ranges that follow or learn, a loss to pull by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_graph import on_batch
from bevquant_qnn._followed_ranges import (
    RangeFollower,
    keep_within_ranges,
    narrow_weights,
    weighted_layers,
)
from bevquant_qnn._freeze import freeze
from bevquant_qnn._snapshots import float_tensors
from bevquant_qnn._sparsity import keep_sparsity
from bevquant_qnn._training_ranges import SMALLEST, learn_ranges
from bevquant_quantizers import named_quantizers
from bevquant_quantizers.ranks import Ranks, tensors_in_order

_Kind = Literal["kl", "mse"]


def distillation_loss(
    student: Any, teacher: Any, *, kind: _Kind = "mse", temperature: float = 1.0, axis: int = 1
) -> Tensor:
    """Return how far the student's outputs are from the teacher's.

    - ``"kl"``, for class scores: T²·mean Σ p·(log p − log q), p and q the softmax of teacher and
      student over `axis` after division by T (Hinton et al. 2015, arXiv 1503.02531, section 2).
    - ``"mse"``, for heat maps, boxes and features: Σ(q − f)²/Σf² of each tensor, the reciprocal of
      its signal-to-noise ratio, so that maps of any size and unit weigh alike.

    Tensors are taken from nested tuples, lists and dicts, of sparse tensors the features; the mean
    over all pairs is returned. The teacher gets no gradient.

    Args:
        student: Outputs of the model in training.
        teacher: Outputs of the float model, of the same structure.
        kind: What to compare.
        temperature: T of ``"kl"``.
        axis: Axis of the classes for ``"kl"``.

    Raises:
        ValueError: Outputs of different shapes or without values, or an unknown kind.

    Example:
        >>> import torch
        >>> distillation_loss(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 2.0]]))
        tensor(0.2000)
    """
    if kind not in get_args(_Kind) or not temperature > 0:
        raise ValueError(
            f"distillation_loss: kind must be 'kl' or 'mse' and temperature positive, got {kind!r} "
            f"and {temperature}"
        )
    own, others = (float_tensors(v) for v in (student, teacher))
    if not own or [t.shape for t in own] != [t.shape for t in others]:
        raise ValueError(
            f"distillation_loss: the student gives {[tuple(t.shape) for t in own]}, the teacher "
            f"{[tuple(t.shape) for t in others]}; both must give the same tensors, at least one"
        )
    losses = []
    for q, f in zip(own, (t.detach() for t in others), strict=True):
        if kind == "mse":
            power = f.square().sum().clamp(min=1e-12)
            losses.append((q - f).square().sum() / power)
        else:
            log_p, log_q = (F.log_softmax(t / temperature, axis) for t in (f, q))
            rows = f.numel() // f.shape[axis]
            divergence = (log_p.exp() * (log_p - log_q)).sum() / rows
            losses.append(temperature**2 * divergence)
    total: Tensor = sum(losses[1:], losses[0]) / len(losses)
    return total


class FramePart(NamedTuple):
    """One sample's forward and backward pass, on the CPU.

    Attributes:
        losses: float64 [terms].
        gradient: float32 [parameters], all gradients concatenated.
        maxima: float32 [quantizers], the largest |value| at each activation quantizer; 0 for an
            unused one. Empty where ranges do not follow.
    """

    losses: Tensor
    gradient: Tensor
    maxima: Tensor


class StepSum(NamedTuple):
    """Sum over a step's samples.

    Attributes:
        losses: float64 [terms], the mean.
        gradient: float32 [parameters], the mean.
        maxima: One entry per sample.
    """

    losses: Tensor
    gradient: Tensor
    maxima: tuple[Tensor, ...]


def add_up(parts: Iterable[FramePart]) -> StepSum:
    """Mean gradient (g₀ + g₁ + …)/n, added in float32 from the first sample to the last.

    The order decides the bits, so the sum does not depend on the process that computed a part.
    Parts are read one by one: a generator holds one gradient and the sum.

    Raises:
        ValueError: No samples.

    Example:
        >>> import torch
        >>> from bevquant_qnn import FramePart, add_up
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
        raise ValueError("add_up: there are no samples to add up")
    return StepSum(losses / len(maxima), gradient / len(maxima), tuple(maxima))


def parts_in_order(
    count: int,
    part: Callable[[int], FramePart],
    ranks: Ranks | None = None,
    *,
    by_gpu: bool = False,
) -> Iterator[FramePart]:
    """Parts of a step's samples in order, from all processes: `tensors_in_order`."""
    return map(FramePart._make, tensors_in_order(count, part, ranks, by_gpu=by_gpu))


RANGE_RATE = 10.0  # a learned range moves by this times the learning rate, relative to itself


class QatTrainer:
    """Trains a calibrated model and its ranges, step by step.

    A step runs its samples one by one, forward and backward, adds their gradients in order, clips
    the norm of the weights' gradient and steps AdamW. Processes of a launcher
    (`bevquant_quantizers.ranks.launched`) share the samples, and each ends a step with the bits of
    a single process.

    Layers in the form 2:4 (`sparsify`) keep their zeros. Layers left in float are frozen.

    Ranges follow the values (`RangeFollower`) or are learned (`learn_ranges`). For the last steps
    they are constant, so that the weights settle under the deployed ranges.

    Args:
        model: Calibrated, from `quantize_model`; changed in place, set to training mode.
        losses: Called with the number of a sample within the whole training, from 0. Runs the model
            on that sample and returns the terms of its loss, scalars with gradient. Random numbers
            must be derived from the sample's number, so that the result depends neither on
            interruptions nor on the process that runs a sample.
        rate: Learning rate by step, from 0.
        batch: Samples per step.
        clip: Largest norm of the weights' gradient.
        weight_decay: Of AdamW; biases and ranges have none.
        learn: Whether ranges are learned by gradient instead of following.
        frozen_after: Step from which ranges are constant.
        train_float: Whether to train parameters outside quantized layers too, and to update
            running statistics of norms there.

    Raises:
        ValueError: There is nothing to train.

    Attributes:
        model: The model.
        optimizer: AdamW, for checkpoints.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bevquant_quantizers import calibrate
        >>> from bevquant_qnn import QatTrainer, distillation_loss, quantize_model
        >>> images = torch.randn(8, 3, 8, 8)
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
        >>> wanted = net(images).detach()
        >>> quantized = quantize_model(net, example_inputs=images).model
        >>> report = calibrate(quantized, [images])
        >>> def losses(sample):
        ...     i = sample % 8
        ...     return [distillation_loss(quantized(images[i : i + 1]), wanted[i : i + 1])]
        >>> trainer = QatTrainer(quantized, losses, lambda step: 1e-3, batch=2, frozen_after=2)
        >>> trainer.begin(images[i : i + 1] for i in range(8))
        >>> told = [trainer.step(number) for number in range(4)]
        >>> trained = trainer.finish()  # as after calibration: simulate, or export
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[int], Sequence[Tensor]],
        rate: Callable[[int], float],
        *,
        batch: int = 1,
        clip: float = math.inf,
        weight_decay: float = 0.0,
        learn: bool = False,
        frozen_after: int = 0,
        train_float: bool = False,
    ) -> None:
        self.model, self._losses, self._rate = model, losses, rate
        self._batch, self._clip, self._frozen_after = batch, clip, frozen_after
        narrow_weights(model, True)
        self._learned = learn_ranges(model) if learn else []
        self._follower = RangeFollower(model) if not learn and frozen_after > 0 else None
        # Ranges have rates of their own, and are not clipped.
        ranges = set(self._learned)
        own = set(model.parameters() if train_float else _of_quantized_layers(model))
        learning = [p for p in model.parameters() if p.requires_grad and p not in ranges]
        self._weights = [p for p in learning if p in own]
        self._frozen = [p for p in learning if p not in own]
        if not self._weights:
            raise ValueError(
                f"QatTrainer: {type(model).__name__} has no quantized layer with a weight that "
                "requires a gradient; quantize a layer, or train float layers (train_float=True)"
            )
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        norms = (m for m in model.modules() if getattr(m, "running_mean", None) is not None)
        self._norms = [] if train_float else [m for m in norms if own.isdisjoint(m.parameters())]
        self.optimizer = self._make_optimizer(weight_decay)
        keep_sparsity(model, self.optimizer)
        self._train()

    def own(self) -> dict[str, Tensor]:
        """State to store beside model and optimizer, to continue training."""
        follower = self._follower
        return {} if follower is None else {"first": follower.first, "mean": follower.mean}

    def go_on(self, own: dict[str, Tensor]) -> None:
        """Continue with the state that `own` returned, instead of `begin`."""
        if self._follower is not None:
            self._follower.first, self._follower.mean = own["first"], own["mean"]

    @torch.no_grad()
    def begin(self, inputs: Iterable[Any]) -> None:
        """Set the start of followed ranges: the largest values on some inputs.

        Args:
            inputs: Batches as a loader gives them, see `bevquant_quantizers.calibrate`. Not read
                where ranges do not follow.
        """
        if self._follower is None:
            return
        self.model.eval()
        maxima, run = [], on_batch(keeps_state=False)
        for given in inputs:
            run(self.model, given)
            maxima.append(self._follower.take())
        self._follower.start(maxima)
        self._train()

    def step(self, number: int) -> list[float]:
        """Take one step.

        Args:
            number: Number of the step, from 0.

        Returns:
            Mean over the samples of each term of the loss.

        Raises:
            FloatingPointError: A loss or a gradient is not finite; the model is unchanged.
        """
        total = add_up(self._parts(number))
        norm = self._put(total)
        losses = [float(value) for value in total.losses]
        # Checked before the step, so that the model is unchanged.
        if not all(map(math.isfinite, (*losses, norm))):
            raise FloatingPointError(
                f"step {number + 1}: the loss is {sum(losses)} and its gradient's norm {norm}"
            )
        still = number >= self._frozen_after
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(number) * group["pace"] * (not (still and group["range"]))
        self.optimizer.step()
        with torch.no_grad():
            for amax in self._learned:
                # A range of 0 or less has no step.
                amax.clamp_(min=SMALLEST)
        if self._follower is not None and not still:
            self._follower.follow(total.maxima)
        return losses

    def finish(self) -> nn.Module:
        """Return the model as after calibration: constant ranges, on the CPU, evaluation mode."""
        if self._follower is not None:
            self._follower.stop()
        model = self.model.cpu().eval()
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        freeze(model)
        # Beyond the range, a weight would become −q − 1 once weights are no longer narrow.
        keep_within_ranges(model)
        narrow_weights(model, False)
        return model

    def _train(self) -> None:
        """Set training mode; frozen norms keep their running statistics."""
        self.model.train()
        for norm in self._norms:
            norm.eval()

    def _parts(self, number: int) -> Iterator[FramePart]:
        by_gpu = any(p.is_cuda for p in self._weights)
        first = number * self._batch
        return parts_in_order(self._batch, lambda place: self._part(first + place), by_gpu=by_gpu)

    def _part(self, sample: int) -> FramePart:
        """Forward and backward of one sample."""
        self.optimizer.zero_grad()
        losses = list(self._losses(sample))
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
        return float(nn.utils.clip_grad_norm_(self._weights, self._clip))

    def _parameters(self) -> list[nn.Parameter]:
        return [*self._weights, *self._learned]

    def _make_optimizer(self, decay: float) -> torch.optim.Optimizer:
        """AdamW (Loshchilov and Hutter 2019) without decay of biases and ranges."""
        common = {"pace": 1.0, "range": False}
        groups = [
            {"params": [p for p in self._weights if p.ndim > 1], "weight_decay": decay, **common},
            {"params": [p for p in self._weights if p.ndim <= 1], "weight_decay": 0.0, **common},
        ]
        for amax in self._learned:
            # Adam's steps are as long as its rate, whatever the gradient. Ranges are hundredths
            # (weights) to hundreds (intensity): each gets a rate in proportion to itself.
            pace = RANGE_RATE * float(amax.detach().mean())
            groups.append({"params": [amax], "weight_decay": 0.0, "pace": pace, "range": True})
        return torch.optim.AdamW(groups)


def _of_quantized_layers(model: nn.Module) -> Iterator[Tensor]:
    """Parameters of quantized layers, those that another module holds, and learned clips."""
    for layer in weighted_layers(model):
        yield from layer.parameters()
        # A projection of an attention reads rows of the attention's own parameter.
        held = (tensor for tensor in (layer.weight, layer.bias) if tensor is not None)
        yield from (tensor if tensor._base is None else tensor._base for tensor in held)
    for entry in named_quantizers(model):
        yield from entry.quantizer.parameters()


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradient.detach().flatten().float().cpu()
