"""What a detector learns by in quantization-aware training: its head, and the float model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevfusion.detectors import DETECTORS
from bevfusion.model import Batch, Detector
from bevfusion.quantization._stage_maps import whole_output
from bevfusion.training import (
    Augmentation,
    Motion,
    PreparedFrames,
    make_batch,
    one_cycle,
    order_of,
)
from bevquant_qnn import QatTrainer, distillation_loss


class Distiller:
    """Compares the decoder's map and the heat map, in which cells mean the same in both models.

    Behind them each model looks at queries of its own choice, so their boxes cannot be compared
    one by one.

    Args:
        student: In training.
        teacher: The float model; put in eval mode.
        weight: Of the distance in the loss.
    """

    def __init__(self, student: Detector, teacher: Detector, weight: float) -> None:
        self._teacher, self._weight = teacher.eval(), weight
        self._maps: dict[str, Any] = {}
        self._handles = []
        for name, model in (("student", student), ("teacher", teacher)):
            neck = model.get_submodule(model.stages["decoder"])
            self._handles.append(neck.register_forward_hook(self._keeper(name)))

    def loss(self, batch: Batch, outputs: dict[str, Tensor]) -> Tensor:
        """Weight · mean of Σ(q − f)²/Σf² of both maps, for what the student just answered.

        Args:
            batch: What it was called with.
            outputs: What it answered, with gradient.
        """
        with torch.no_grad():
            wanted = self._teacher(*batch)
        pairs = [(self._maps[name], whole_output(found))
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


class QatDetectorTrainer(QatTrainer):
    """`QatTrainer` of a detector, on frames that are moved at random.

    Every random choice comes from the seed and the number of the frame in the run, so that neither
    a stop between two steps nor the process that runs a frame shows in the result.

    Args:
        model: Calibrated, where it is to be trained; changed in place.
        frames: To train on.
        steps: Of the whole run.
        batch: Frames in each step; each is run by itself.
        lr: Largest learning rate; see `one_cycle`.
        weight_decay: AdamW's.
        clip: Largest norm of a step's gradient.
        seed: Of order, augmentation and dropout.
        augmentation: How frames are moved.
        learn_ranges: Learn the ranges by gradient instead of following the largest values.
        frozen_after: The step from which on ranges stand still.
        teacher: The float model to stay near, or None.
        distill: Weight of the distance to it; see `Distiller`.

    Attributes:
        terms: What the losses of a step are.
    """

    model: Detector

    def __init__(
        self,
        model: Detector,
        frames: PreparedFrames,
        *,
        steps: int,
        batch: int,
        lr: float,
        weight_decay: float,
        clip: float,
        seed: int,
        augmentation: Augmentation,
        learn_ranges: bool = False,
        frozen_after: int = 0,
        teacher: Detector | None = None,
        distill: float = 0.0,
    ) -> None:
        self._frames, self._seed, self._augmentation = frames, seed, augmentation
        self._device = next(model.parameters()).device
        self._distiller = None if teacher is None else Distiller(model, teacher, distill)
        objective = DETECTORS[model.kind].objective
        assert objective is not None  # a detector in other code has no kind there
        self._objective = objective
        self.terms = (*self._objective.terms, *(["distillation"] if self._distiller else []))
        super().__init__(
            model,
            self._losses_of,
            lambda step: one_cycle(step, steps, lr),
            batch=batch,
            clip=clip,
            weight_decay=weight_decay,
            learn=learn_ranges,
            frozen_after=frozen_after,
        )

    def survey(self) -> None:
        """Set what ranges are followed from, by the first frames."""
        count = min(SURVEYED, len(self._frames))
        self.begin(
            self._batch_of(index, Motion())[0]
            for index in order_of(self._seed, 0, count, len(self._frames))
        )

    def finish(self) -> Detector:
        """The model as it is written: ranges constant, on the CPU in eval mode."""
        if self._distiller is not None:
            self._distiller.stop()
        super().finish()
        return self.model

    def _batch_of(self, index: int, motion: Motion) -> tuple[Batch, Any]:
        batch, targets = make_batch([self._frames[index]], [motion], self.model)
        return batch.to(self._device), targets

    def _losses_of(self, sample: int) -> list[Tensor]:
        (index,) = order_of(self._seed, sample, 1, len(self._frames))
        generator = np.random.default_rng((self._seed, 2, sample))
        batch, targets = self._batch_of(index, self._augmentation.draw(generator))
        torch.manual_seed(int(generator.integers(2**63)))  # of dropout
        outputs = self.model(*batch)
        losses = list(self._objective.loss(outputs, targets, self.model.head.config))
        if self._distiller is not None:
            losses.append(self._distiller.loss(batch, outputs))
        return losses
