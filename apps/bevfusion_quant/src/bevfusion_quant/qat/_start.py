"""The run that training starts from, and what it cannot start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bevfusion_quant._errors import InputError
from bevfusion_quant.options import TrainedBranch
from bevfusion_quant.steps import ModelSettings, built_parts, read_model_settings

__all__ = ["TrainableRun", "read_trainable"]


@dataclass(frozen=True)
class TrainableRun:
    """A run with a detector in it, not loaded yet.

    Attributes:
        folder: Where it lies.
        settings: Its settings.
    """

    folder: Path
    settings: ModelSettings

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are built."""
        return built_parts(self.settings.branch)

    @property
    def sensors(self) -> TrainedBranch:
        """What `train` calls a detector that reads the same."""
        both = {"lidar", "camera"} <= set(self.parts)
        return "all" if both else "camera" if "camera" in self.parts else "lidar"


def read_trainable(run: str | Path) -> TrainableRun:
    """Read a run's settings and refuse what has no loss.

    Raises:
        InputError: No run with a model, one for a BPU, or one without a head.
    """
    settings = read_model_settings(run)
    if settings.for_bpu:
        raise InputError(f"{run} is a run for a BPU: qat trains runs of ptq without --target bpu")
    found = TrainableRun(Path(run), settings)
    if "head" not in found.parts:
        raise InputError(
            f"{run} holds the {settings.branch} encoder alone, and without a head "
            "there are no detections to train by: quantize a detector, with ptq --branch all (or "
            "fuser, decoder, head, lidar-detector, camera-detector)"
        )
    if not settings.fold:
        raise InputError(
            f"{run} has batch norms that are not folded, and qat trains folded models: quantize "
            "again with ptq without --no-fold"
        )
    return found
