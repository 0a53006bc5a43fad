"""The command line's options: one frozen dataclass for each sub-command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Command", "Demo", "Ptq", "Tree"]

ConfigName = Literal["nuscenes", "tiny"]
Method = Literal["mse", "max", "entropy", "percentile"]


@dataclass(frozen=True)
class Demo:
    """Fold, quantize, calibrate and compare on an embedded street scene; no download, no data.

    Args:
        config: Sizes of the branch.
        method: How activation ranges are chosen.
        seed: Seed of the street and of the random weights.
        runs: Folder of all runs.
        name: The run's folder in it; by default demo, demo-2, …
        overwrite: Replace an earlier run of that name.
    """

    config: ConfigName = "nuscenes"
    method: Method = "mse"
    seed: int = 0
    runs: Path = Path("runs")
    name: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Ptq:
    """Fold, quantize, calibrate and compare on your own LiDAR frames.

    Args:
        points: Frames: nuScenes or KITTI .bin, .npz, NVIDIA .tensor, or folders of them.
        config: Sizes of the branch.
        branch: Which branch of BEVFusion.
        weights: mit-bevfusion state dict (.pth or .safetensors); random weights without it.
        weight_layout: How that file stores sparse weights; auto takes it from the shapes where they
            allow one layout only.
        method: How activation ranges are chosen.
        calibration_frames: How many frames, from the first, set the ranges; 0 for all.
        exclude: Paths or globs below the backbone to leave float, such as conv_input.
        columns: Columns of a .bin, 4 or 5, where the file leaves it open.
        dtype: Number type of a .bin, where the file leaves it open.
        nonfinite: What to do with NaN and Inf points.
        seed: Seed of random weights.
        runs: Folder of all runs.
        name: The run's folder in it; by default ptq, ptq-2, …
        overwrite: Replace an earlier run of that name.
    """

    points: tuple[Path, ...]
    config: ConfigName = "nuscenes"
    branch: Literal["lidar"] = "lidar"
    weights: Path | None = None
    weight_layout: Literal["auto", "RSCK", "KRSC", "KCRS"] = "auto"
    method: Method = "mse"
    calibration_frames: int = 0
    exclude: tuple[str, ...] = ()
    columns: Literal[4, 5] | None = None
    dtype: Literal["float32", "float16"] | None = None
    nonfinite: Literal["raise", "drop"] = "raise"
    seed: int = 0
    runs: Path = Path("runs")
    name: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Tree:
    """Print the module tree at one stage.

    Args:
        branch: Which branch of BEVFusion.
        stage: float, with BatchNorms folded, or with quantizers in place.
        config: Sizes of the branch.
    """

    branch: Literal["lidar"] = "lidar"
    stage: Literal["float", "fused", "quantized"] = "float"
    config: ConfigName = "nuscenes"


Command = Demo | Ptq | Tree
