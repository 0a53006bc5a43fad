"""What decides the result of a run for a BPU."""

from __future__ import annotations

from dataclasses import dataclass

from bev_data.cameras import CAMERA_NAMES
from bevfusion_quant._errors import InputError
from bevfusion_quant.options import Branch, MarchName, Method, TargetOptions

__all__ = ["BpuConfig", "bpu_parts"]

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
class BpuConfig(TargetOptions):
    """Everything that decides the result of a run for a BPU, its frames apart.

    Args:
        branch: What runs on the BPU: "camera" (built alone: backbone and neck), "fuser" or
            "decoder" in the whole model, or "all" three.
        method: How activation ranges are chosen: "percentile" (99.99 % of all values), "max",
            "mse" or "entropy".
        march: The BPU's architecture.
        cameras: Names of the cameras to use, in this order.
    """

    branch: Branch = "all"
    method: Method = "percentile"
    march: MarchName = "bayes"
    cameras: tuple[str, ...] = CAMERA_NAMES


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
