"""What decides the result of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field

from bev_data.cameras import CAMERA_NAMES
from bevfusion.model import CONFIGS
from bevfusion.training import Augmentation
from bevfusion_quant._errors import InputError
from bevfusion_quant.options import TrainOptions

__all__ = ["TRAINED_BRANCHES", "TrainConfig"]

TRAINED_BRANCHES: dict[str, tuple[str, ...]] = {
    "lidar": ("lidar", "decoder", "head"),
    "camera": ("camera", "decoder", "head"),
    "all": ("camera", "lidar", "fuser", "decoder", "head"),
}
"""The parts that are built for each branch: a detector needs decoder and head."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainOptions):
    """Everything that decides the trained weights, the frames apart; see `TrainOptions`.

    Args:
        augmentation: How frames are moved.
        cameras: Names of the cameras to use, in this order.

    Raises:
        InputError: A setting outside its range, named as the option of the command.
    """

    augmentation: Augmentation = field(default_factory=Augmentation)
    cameras: tuple[str, ...] = CAMERA_NAMES

    def __post_init__(self) -> None:
        self.check_optimizer()
        for name, known in (("config", CONFIGS), ("branch", TRAINED_BRANCHES)):
            if getattr(self, name) not in known:
                raise InputError(f"--{name} {getattr(self, name)}: one of {', '.join(known)}")

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the model that are built."""
        return TRAINED_BRANCHES[self.branch]

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the network's images; None where it reads none."""
        return CONFIGS[self.config].camera.image_size if "camera" in self.parts else None
