"""What decides the result of a run, and which of it goes together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from bev_data.cameras import CAMERA_NAMES
from bevfusion_quant._errors import InputError

if TYPE_CHECKING:
    from bevfusion_quant.ptq._branches import Branch
    from bevfusion_quant.ptq._stages import Method

__all__ = ["PtqConfig", "Rounding", "calibration_count", "check_weights"]

Rounding = Literal["nearest", "gptq"]


@dataclass(frozen=True)
class PtqConfig:
    """Everything that decides the result of a run, its frames apart.

    Args:
        config: Sizes of the model: "nuscenes" or "tiny".
        branch: What to quantize: "camera" or "lidar", that encoder built alone; "fuser", "decoder"
            or "head", that part in the whole model; "all", the whole model but its head;
            "lidar-detector" or "camera-detector", encoder and decoder of a detector of one sensor.
        method: How activation ranges are chosen.
        weights: State dict to load; None for random weights.
        weight_layout: How that file stores sparse weights, or "auto".
        seed: Seed of random weights.
        calibration_frames: How many frames, from the first, set the ranges; 0 for all.
        exclude: Paths or globs to leave float, in full or below the part.
        quantize_head: With branch "all" or a detector, the head too.
        quantize_first_layer: The first sparse convolution in int8 too. It reads the raw features,
            and both of NVIDIA's exporters write it as fp16. A plan that names it goes before this.
        cameras: Names of the cameras to use, in this order.
        plan: Precisions of the layers, from `run_sensitivity`; None for int8 throughout.
        weight_bits: Bits of every quantized weight, 4 to 8; activations have 8. Not with a plan,
            which says the bits of each layer.
        rounding: How weights are rounded: each to the nearest, or so that the layer's output comes
            out right ("gptq"; `bevquant_qnn.round_weights`), on the calibration frames.
        bias_correction: Add to each bias what rounding shifts the layer's output by on average.
        fold: Fold batch norms into the convolutions before anything is quantized. Without, a model
            has no form in integers and in files.
    """

    config: str = "nuscenes"
    branch: Branch = "lidar"
    method: Method = "mse"
    weights: Path | None = None
    weight_layout: str = "auto"
    seed: int = 0
    calibration_frames: int = 0
    exclude: tuple[str, ...] = ()
    quantize_head: bool = False
    quantize_first_layer: bool = False
    cameras: tuple[str, ...] = CAMERA_NAMES
    plan: Path | None = None
    weight_bits: int = 8
    rounding: Rounding = "nearest"
    bias_correction: bool = False
    fold: bool = True

    @property
    def changes_weights(self) -> bool:
        """Whether the quantized model's weights or biases are other than the float model's."""
        return self.rounding != "nearest" or self.bias_correction


def calibration_count(config: PtqConfig, frames: int) -> int:
    """How many frames set the ranges.

    Raises:
        InputError: More than there are, or a negative number of them or as the seed.
    """
    count = config.calibration_frames or frames
    if not 1 <= count <= frames:
        raise InputError(
            f"--calibration-frames {count} of {frames} frames: it must be from 1 to the number of "
            "frames given, or 0 for all of them"
        )
    if config.seed < 0:
        raise InputError(f"--seed {config.seed}: it must not be negative")
    return count


def check_weights(config: PtqConfig, *, needs_folding: str = "") -> None:
    """Refuse settings of the weights that do not go together.

    Args:
        config: The settings.
        needs_folding: What else the run is to do that an unfolded model cannot, such as "files".

    Raises:
        InputError: Naming the options.
    """
    if not 4 <= config.weight_bits <= 8:
        raise InputError(f"--weight-bits {config.weight_bits}: weights have 4 to 8 bits")
    if config.plan is not None and config.weight_bits != 8:
        raise InputError(
            f"--weight-bits {config.weight_bits} with --plan {config.plan}: the plan says the bits "
            "of each layer; leave one of the two out"
        )
    if config.rounding not in get_args(Rounding):
        raise InputError(f"--rounding {config.rounding}: expected one of nearest, gptq")
    if config.fold:
        return
    if config.changes_weights:
        raise InputError(
            "--no-fold with --rounding gptq or --bias-correction: weights are rounded as they are "
            "deployed, batch norms folded, and convolutions before a batch norm have no bias to "
            "correct; leave --no-fold out"
        )
    if needs_folding:
        raise InputError(
            f"--no-fold: {needs_folding} need batch norms folded into the convolutions; leave it "
            "out"
        )
