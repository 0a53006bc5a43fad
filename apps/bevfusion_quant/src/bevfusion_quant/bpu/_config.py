"""What decides the result of a run for a BPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from bev_data.cameras import CAMERA_NAMES
from bevfusion_quant._errors import InputError
from bevfusion_quant.ptq import Branch, Method, PtqConfig

__all__ = ["BpuConfig", "MarchName", "bpu_parts"]

MarchName = Literal["bayes", "bernoulli2", "bayes-e"]

_PARTS: dict[str, tuple[str, ...]] = {
    "camera": ("camera",),
    "fuser": ("fuser",),
    "decoder": ("decoder",),
    "all": ("camera", "fuser", "decoder"),
}
_NO_BPU_PART = {
    "lidar": "its sparse convolutions have no BPU form",
    "head": "its attention and its choice of queries run on the CPU",
}


@dataclass(frozen=True)
class BpuConfig:
    """Everything that decides the result of a run for a BPU, its frames apart.

    Args:
        config: Sizes of the model: "nuscenes" or "tiny".
        branch: What runs on the BPU: "camera" (built alone: backbone and neck), "fuser" or
            "decoder" in the whole model, or "all" three.
        march: The BPU's architecture: "bayes", "bernoulli2" or "bayes-e".
        method: How activation ranges are chosen: "percentile" (99.99 % of all values), "max",
            "mse" or "entropy".
        weights: State dict to load; None for random weights.
        weight_layout: How that file stores sparse weights, or "auto".
        seed: Seed of random weights.
        calibration_frames: How many frames, from the first, set the ranges; 0 for all.
        exclude: Paths or globs to run on the CPU in float.
        cameras: Names of the cameras to use, in this order.
    """

    config: str = "nuscenes"
    branch: Branch = "all"
    march: MarchName = "bayes"
    method: Method = "percentile"
    weights: Path | None = None
    weight_layout: str = "auto"
    seed: int = 0
    calibration_frames: int = 0
    exclude: tuple[str, ...] = ()
    cameras: tuple[str, ...] = CAMERA_NAMES

    def without_march(self) -> PtqConfig:
        """What the run has in common with one for another target."""
        fields = asdict(self)
        fields.pop("march")
        return PtqConfig(**fields)


def bpu_parts(branch: str) -> tuple[str, ...]:
    """The parts of the model that run on the BPU, wholly or but for what follows the neck.

    Raises:
        InputError: The branch has no part that a BPU could run.

    Example:
        >>> bpu_parts("all")
        ('camera', 'fuser', 'decoder')
    """
    if branch not in _PARTS:
        raise InputError(
            f"--target bpu has nothing to do for --branch {branch}: {_NO_BPU_PART[branch]}; choose "
            f"--branch {', '.join(_PARTS)} (with --dataset, as they read images), or leave "
            "--target bpu out"
        )
    return _PARTS[branch]
