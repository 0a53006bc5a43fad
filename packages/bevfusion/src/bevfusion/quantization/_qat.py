"""Losses of quantization-aware training: of the head, and of the distance to the float model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevfusion.detectors import DETECTORS
from bevfusion.model import Batch, Detector
from bevfusion.quantization._stage_maps import whole_output
from bevfusion.training import Augmentation, Motion, PreparedFrames, make_batch, one_cycle, order_of
from bevquant_qnn import QatTrainer, distillation_loss


class Distiller:
    """Compares the decoder's map and the heat map, whose cells correspond in both models.

    Downstream each model selects queries of its own, so boxes do not correspond one to one.

    Args:
        student: The trained model.
        teacher: The float model; put in eval mode.
        weight: Weight of the distance in the loss.
    """

    def __init__(self, student: Detector, teacher: Detector, weight: float) -> None:
        self._teacher, self._weight = teacher.eval(), weight
        self._maps: dict[str, Any] = {}
        self._handles = []
        for name, model in (("student", student), ("teacher", teacher)):
            neck = model.get_submodule(model.stages["decoder"])
            self._handles.append(neck.register_forward_hook(self._keeper(name)))

    def loss(self, batch: Batch, outputs: dict[str, Tensor]) -> Tensor:
        """Weight · mean of Σ(q − f)²/Σf² over both maps, for the student's last output.

        Args:
            batch: Its input.
            outputs: Its output, with gradient.
        """
        with torch.no_grad():
            wanted = self._teacher(*batch)
        pairs = [(self._maps[name], whole_output(found))
                 for name, found in (("student", outputs), ("teacher", wanted))]  # fmt: skip
        self._maps.clear()
        return self._weight * distillation_loss(*pairs)

    def stop(self) -> None:
        """Remove the hooks that record maps."""
        for handle in self._handles:
            handle.remove()

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._maps[name] = output

        return keep


SURVEYED = 16  # frames whose maxima ranges are followed from


class QatDetectorTrainer(QatTrainer):
    """`QatTrainer` of a detector, on randomly moved frames.

    Every random choice derives from the seed and the frame's number in the run. An interrupted run,
    or another distribution over processes, gives the same result.

    Args:
        model: The calibrated model on its training device; changed in place.
        frames: Frames to train on.
        steps: Steps of the whole run.
        batch: Frames in each step; each runs by itself.
        lr: Largest learning rate; see `one_cycle`.
        weight_decay: Weight decay of AdamW.
        clip: Largest norm of a step's gradient.
        seed: Seed of order, augmentation and dropout.
        augmentation: Random movements of frames.
        learn_ranges: Learn the ranges by gradient instead of following the largest values.
        frozen_after: Step from which ranges are constant.
        teacher: Float model for distillation, or None.
        distill: Weight of the distance to it; see `Distiller`.

    Attributes:
        terms: Names of the losses.
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
        """Initialise the followed ranges from the first frames."""
        count = min(SURVEYED, len(self._frames))
        self.begin(
            self._batch_of(index, Motion())[0]
            for index in order_of(self._seed, 0, count, len(self._frames))
        )

    def finish(self) -> Detector:
        """The model for saving: ranges constant, on the CPU in eval mode."""
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
