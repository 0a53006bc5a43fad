"""What a detector learns by in quantization-aware training: its head, and the float model."""

from __future__ import annotations

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
from bevquant_qnn import QatTrainer, distillation_loss


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


class Trainer(QatTrainer):
    """`QatTrainer` of a detector, on frames that are moved at random.

    Every random choice comes from the seed and the number of the frame in the run, so that neither
    a stop between two steps nor the process that runs a frame shows in the result.

    Args:
        model: Calibrated; changed in place.
        teacher: The float model to stay near, or None.
        frames: To train on.
        config: How.
        device: Where both models are.
    """

    model: BEVFusion

    def __init__(
        self,
        model: BEVFusion,
        teacher: BEVFusion | None,
        frames: PreparedFrames,
        config: QatConfig,
        device: torch.device,
    ) -> None:
        self._frames, self._config, self._device = frames, config, device
        self._distiller = None if teacher is None else Distiller(model, teacher, config.distill)
        super().__init__(
            model,
            self._losses_of,
            lambda step: one_cycle(step, config.steps, config.lr),
            batch=config.batch,
            clip=config.clip,
            weight_decay=config.weight_decay,
            learn=config.learn_ranges,
            frozen_after=config.frozen_after,
        )

    @property
    def terms(self) -> tuple[str, ...]:
        """What the losses of a step are."""
        return ("heatmap", "class", "box", *(["distillation"] if self._distiller else []))

    def survey(self) -> None:
        """Set what ranges are followed from, by the first frames."""
        count = min(SURVEYED, len(self._frames))
        self.begin(
            self._batch_of(index, Motion())[0]
            for index in order_of(self._config.seed, 0, count, len(self._frames))
        )

    def step(self, number: int) -> list[float]:
        """Take one step, counted from 0.

        Raises:
            InputError: A loss that is no number, or a frame that cannot be trained on.
        """
        try:
            return super().step(number)
        except FloatingPointError as error:
            raise InputError(
                f"{error}: lower --lr or --clip and begin anew; the last checkpoint is kept"
            ) from error

    def finish(self) -> BEVFusion:
        """The model as it is written: ranges constant, on the CPU in eval mode."""
        if self._distiller is not None:
            self._distiller.stop()
        super().finish()
        return self.model

    def _batch_of(self, index: int, motion: Motion) -> tuple[Batch, Any]:
        batch, targets = make_batch([self._frames[index]], [motion], self.model)
        return batch.to(self._device), targets

    def _losses_of(self, sample: int) -> list[Tensor]:
        (index,) = order_of(self._config.seed, sample, 1, len(self._frames))
        generator = np.random.default_rng((self._config.seed, 2, sample))
        batch, targets = self._batch_of(index, self._config.augmentation.draw(generator))
        torch.manual_seed(int(generator.integers(2**63)))  # of dropout
        outputs = self.model(*batch)
        losses = list(head_loss(outputs, targets, self.model.head.config))
        if self._distiller is not None:
            losses.append(self._distiller.loss(batch, outputs))
        return losses
