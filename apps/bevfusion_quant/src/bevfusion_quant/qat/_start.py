"""The run that training starts from, and what it cannot start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bev_data.cameras import CAMERA_NAMES
from bevfusion_quant._errors import InputError
from bevfusion_quant.options import TrainedBranch
from bevfusion_quant.steps import built_parts, read_run_config

__all__ = ["TrainableRun", "read_trainable"]


@dataclass(frozen=True)
class TrainableRun:
    """A run with a detector in it, not loaded yet.

    Attributes:
        folder: Where it lies.
        config: Its settings.
    """

    folder: Path
    config: dict[str, Any]

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are built."""
        return built_parts(self.config.get("branch", "lidar"))

    @property
    def sensors(self) -> TrainedBranch:
        """What `train` calls a detector that reads the same."""
        both = {"lidar", "camera"} <= set(self.parts)
        return "all" if both else "camera" if "camera" in self.parts else "lidar"

    @property
    def cameras(self) -> tuple[str, ...]:
        """The cameras that its models read."""
        return tuple(self.config.get("cameras") or CAMERA_NAMES)


def read_trainable(run: str | Path) -> TrainableRun:
    """Read a run's settings and refuse what has no loss.

    Raises:
        InputError: No run with a model, one for a BPU, or one without a head.
    """
    config = read_run_config(run)
    if config.get("target") == "bpu":
        raise InputError(f"{run} is a run for a BPU: qat trains runs of ptq without --target bpu")
    found = TrainableRun(Path(run), config)
    if "head" not in found.parts:
        raise InputError(
            f"{run} holds the {config.get('branch', 'lidar')} encoder alone, and without a head "
            "there are no detections to train by: quantize a detector, with ptq --branch all (or "
            "fuser, decoder, head, lidar-detector, camera-detector)"
        )
    if not config.get("fold", True):
        raise InputError(
            f"{run} has batch norms that are not folded, and qat trains folded models: quantize "
            "again with ptq without --no-fold"
        )
    return found
