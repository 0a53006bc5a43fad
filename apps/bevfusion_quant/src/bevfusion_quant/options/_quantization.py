"""What decides the result of post-training quantization."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bevfusion_quant._errors import InputError
from bevfusion_quant.options._choices import Branch, ConfigName, Method, Rounding, WeightLayout

__all__ = ["PtqOptions", "TargetOptions"]


@dataclass(frozen=True)
class TargetOptions:
    """For whatever target.

    Args:
        config: Sizes of the model.
        branch: What to quantize: camera or lidar, that encoder built alone; fuser, decoder or
            head, that part in the whole model; all, the whole model but its head; lidar-detector
            and camera-detector, all but the head of a detector of one sensor, as `train` makes
            them. By default lidar for --points, all for --dataset.
        method: How activation ranges are chosen; mse by default, for a BPU percentile.
        weights: mit-bevfusion state dict (.pth or .safetensors), or trained for the weights that
            come with the package; random weights without it.
        weight_layout: How that file stores sparse weights; auto takes it from the shapes where they
            allow one layout only.
        seed: Seed of random weights.
        calibration_frames: How many frames, from the first, set the ranges; 0 for all.
        exclude: Paths or globs to leave float, in full or below the part, such as conv_input; for a
            BPU, to run on the CPU.
    """

    config: ConfigName = "nuscenes"
    branch: Branch | None = None
    method: Method | None = None
    weights: Path | None = None
    weight_layout: WeightLayout = "auto"
    seed: int = 0
    calibration_frames: int = 0
    exclude: tuple[str, ...] = ()

    def calibration_count(self, frames: int) -> int:
        """How many of so many frames set the ranges.

        Raises:
            InputError: More than there are, or a negative number of them or as the seed.
        """
        count = self.calibration_frames or frames
        if not 1 <= count <= frames:
            raise InputError(
                f"--calibration-frames {count} of {frames} frames: it must be from 1 to the number "
                "of frames given, or 0 for all of them"
            )
        if self.seed < 0:
            raise InputError(f"--seed {self.seed}: it must not be negative")
        return count


@dataclass(frozen=True)
class PtqOptions(TargetOptions):
    """For NVIDIA's engines and CPUs; a BPU refuses what differs from the defaults here.

    Args:
        quantize_head: With --branch all or a detector, the head too.
        quantize_first_layer: The first sparse convolution in int8 too; NVIDIA deploys it in fp16.
        plan: Precisions of the layers, the plan.json of `sensitivity --budget`: int8, 16-bit
            activations, or float. By default every layer is int8.
        weight_bits: Bits of every quantized weight, 4 to 8; activations have 8.
        rounding: How weights are rounded: each to the nearest, or (gptq) so that every layer's
            output comes out right on the calibration frames.
        bias_correction: Add to biases what rounding shifts the layers' outputs by on average.
        fold: Fold batch norms into convolutions first; a run without has no form in integers and
            in files.
    """

    quantize_head: bool = False
    quantize_first_layer: bool = False
    plan: Path | None = None
    weight_bits: int = 8
    rounding: Rounding = "nearest"
    bias_correction: bool = False
    fold: bool = True
