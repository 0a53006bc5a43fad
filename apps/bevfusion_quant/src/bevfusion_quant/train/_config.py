"""What decides the result of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bev_data.cameras import CAMERA_NAMES
from bevfusion.model import CONFIGS
from bevfusion.training import Augmentation
from bevfusion_quant._errors import InputError

if TYPE_CHECKING:
    from bevfusion_quant.qat import QatConfig

__all__ = ["TRAINED_BRANCHES", "TrainConfig", "check_optimization"]

TRAINED_BRANCHES: dict[str, tuple[str, ...]] = {
    "lidar": ("lidar", "decoder", "head"),
    "camera": ("camera", "decoder", "head"),
    "all": ("camera", "lidar", "fuser", "decoder", "head"),
}
"""The parts that are built for each branch: a detector needs decoder and head."""


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the trained weights, the frames apart.

    Args:
        config: Sizes of the model: "tiny" or "nuscenes".
        branch: "lidar" or "camera", a detector of that sensor alone, or "all", both fused. The
            camera branch reads the LiDAR's depth too, as mit-bevfusion's does.
        steps: Of the optimizer.
        batch: Frames in each step.
        lr: The largest learning rate of the one-cycle schedule.
        weight_decay: AdamW's, of weights with more than one axis.
        clip: Gradients are scaled down to this norm.
        seed: Of the first weights, the order of the frames, the augmentation and dropout.
        augmentation: How frames are moved.
        cameras: Names of the cameras to use, in this order.
        start: Weights to start from: the entries that fit are taken.
        half: Store the weights, not the norms, as float16; they are judged as stored.

    Raises:
        InputError: A setting outside its range, named as the option of the command.
    """

    config: str = "tiny"
    branch: Literal["lidar", "camera", "all"] = "all"
    steps: int = 2000
    batch: int = 4
    lr: float = 2e-3
    weight_decay: float = 0.01
    clip: float = 10.0
    seed: int = 0
    augmentation: Augmentation = field(default_factory=Augmentation)
    cameras: tuple[str, ...] = CAMERA_NAMES
    start: Path | None = None
    half: bool = False

    def __post_init__(self) -> None:
        check_optimization(self)
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


def check_optimization(config: TrainConfig | QatConfig) -> None:
    """Check what training and quantization-aware training both are set by.

    Raises:
        InputError: A setting outside its range, named as the option of the command.
    """
    for name in ("steps", "batch"):
        if getattr(config, name) < 1:
            raise InputError(f"--{name} {getattr(config, name)}: it must be at least 1")
    for name in ("lr", "clip"):
        if not 0 < getattr(config, name) < float("inf"):
            raise InputError(f"--{name} {getattr(config, name)}: it must be above 0")
    if not 0 <= config.weight_decay < 1:
        raise InputError(f"--weight-decay {config.weight_decay}: it must be from 0 to 1")
    if config.seed < 0:
        raise InputError(f"--seed {config.seed}: it must not be negative")
