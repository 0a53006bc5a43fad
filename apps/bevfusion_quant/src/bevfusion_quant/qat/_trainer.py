"""The settings of quantization-aware training, and a trainer by them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from bevfusion.model import BEVFusion
from bevfusion.quantization import QatDetectorTrainer
from bevfusion.training import Augmentation, PreparedFrames
from bevfusion_quant._errors import InputError
from bevfusion_quant.options import QatOptions


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


class Trainer(QatDetectorTrainer):
    """`bevfusion.quantization.QatDetectorTrainer` as the configuration of a run says.

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
        told = {name: getattr(config, name) for name in _TRAINED_BY}
        super().__init__(model.to(device), frames, teacher=teacher, **told)


_TRAINED_BY = (
    "steps", "batch", "lr", "weight_decay", "clip", "seed", "augmentation", "learn_ranges",
    "frozen_after", "distill",
)  # fmt: skip
