"""Training of a float detector: initial weights, and single steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from bevfusion.model import Detector
from bevfusion.training._compact import CompactFrame
from bevfusion.training._head_loss import TRANSFUSION_OBJECTIVE, Objective
from bevfusion.training._loop import one_cycle
from bevfusion.training._prepare import PreparedFrames
from bevfusion.training._samples import Augmentation, make_batch, order_of

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
