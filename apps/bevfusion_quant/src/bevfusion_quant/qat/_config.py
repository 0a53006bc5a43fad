"""What decides the result of quantization-aware training, the run it starts from apart."""

from __future__ import annotations

from dataclasses import dataclass, field

from bevfusion.training import Augmentation
from bevfusion_quant._errors import InputError
from bevfusion_quant.options import QatOptions

__all__ = ["QatConfig"]


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
