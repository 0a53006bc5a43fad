"""What decides the result of quantization-aware training, the run it starts from apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from bevfusion_quant._errors import InputError
from bevfusion_quant.train import Augmentation
from bevfusion_quant.train._config import check_optimization

__all__ = ["QatConfig"]


@dataclass(frozen=True)
class QatConfig:
    """Settings of a run of `run_qat`.

    Args:
        steps: Of the optimizer.
        batch: Frames in each step; each is run by itself, and their gradients are averaged.
        lr: The largest learning rate of the one-cycle schedule.
        weight_decay: AdamW's, of weights with more than one axis.
        clip: The weights' gradient is scaled down to this norm.
        seed: Of the order of the frames, the augmentation and dropout.
        augmentation: How frames are moved.
        freeze_after: Steps after which all ranges stand still: 0 leaves them as calibrated, None
            means half of the steps.
        learn_ranges: Learn the ranges by gradient (LSQ) instead of following the values' maxima.
        distill: Weight of the distance to the float model in the loss; 0 for none.

    Raises:
        InputError: A setting outside its range, named as the option of the command.

    Example:
        >>> from bevfusion_quant.qat import QatConfig
        >>> QatConfig(steps=300).frozen_after
        150
    """

    steps: int = 200
    batch: int = 2
    lr: float = 3e-4
    weight_decay: float = 0.01
    clip: float = 10.0
    seed: int = 0
    augmentation: Augmentation = field(default_factory=Augmentation)
    freeze_after: int | None = None
    learn_ranges: bool = False
    distill: float = 0.0

    def __post_init__(self) -> None:
        check_optimization(self)
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
