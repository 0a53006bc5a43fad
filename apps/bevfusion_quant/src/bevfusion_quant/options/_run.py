"""Options of every command: source of the frames, quantization, folder of the run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_type_hints

from bevfusion_quant._errors import InputError
from bevfusion_quant.options._choices import (
    AnyModelName,
    Branch,
    ConfigName,
    DatasetKind,
    MarchName,
    Method,
    Rounding,
    WeightLayout,
    unknown_name,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from bev_data.metrics import Bootstrap


@dataclass(frozen=True)
class TargetOptions:
    """For whatever target.

    Args:
        model: The detector: bevfusion (cameras and LiDAR), centerpoint (LiDAR, voxels) or
            centerpoint-pillars.
        config: Sizes of the model. nuscenes has a ResNet for cameras, nuscenes-swint a Swin
            transformer; waymo and nuscenes-voxel01 are centerpoint's. FILE is the config.json or
            the folder of a run: its settings become the defaults.
        branch: Part to quantize. camera, lidar: that encoder, built alone. fuser, decoder, head:
            that part of the whole model. all: the whole model, of bevfusion without its head.
            lidar-detector, camera-detector: a detector of one sensor without its head, as `train`
            makes it. Default: lidar for bevfusion with --points, else all.
        method: Search method of activation ranges. Default: mse, for a BPU percentile.
        weights: Checkpoint of mit-bevfusion, mmdetection3d, OpenPCDet or det3d, or trained for the
            package's own weights. Default: random weights.
        weight_entry: Entry of the checkpoint to read, such as ema_state_dict. Default: the
            framework's usual one.
        weight_layout: Layout of the checkpoint's sparse weights. auto detects it from the shapes if
            one layout alone fits.
        seed: Seed of random weights.
        calibration_frames: Number of frames, from the first on, that set the ranges; 0 for all.
        exclude: Paths or globs of layers to keep in float, such as conv_input; for a BPU they run
            on its CPU. A path may leave out the part's name.
    """

    model: AnyModelName = field(default="bevfusion", kw_only=True)
    config: ConfigName = "nuscenes"
    branch: Branch | None = None
    method: Method | None = None
    weights: Path | None = None
    weight_entry: str | None = None
    weight_layout: WeightLayout = "auto"
    seed: int = 0
    calibration_frames: int = 0
    exclude: tuple[str, ...] = ()

    def calibration_count(self, frames: int) -> int:
        """Number of the frames that set the ranges.

        Raises:
            InputError: More frames than there are, or a negative number or seed.
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
        quantize_head: Quantize the head too, with --branch all or a detector.
        quantize_first_layer: Quantize the first sparse convolution too; NVIDIA deploys it in fp16.
        plan: Precision of each layer: the plan.json of `sensitivity --budget`. Default: int8 for
            every layer.
        weight_bits: Bits of quantized weights, 4 to 8; activations have 8.
        output_weight_bits: Bits of the weights of the layers that compute the outputs of a
            quantized head, 4 to 8. Fewer cost most of the accuracy that --weight-bits 4 costs.
        unsigned: Integers 0 to 255, with half the step, for maps that are never negative, as behind
            ReLU. For the simulator and files for onnxruntime and openvino.
        rounding: Rounding of weights. nearest: each by itself. gptq: minimizes the error of each
            layer's output on the calibration frames.
        bias_correction: Correct biases by the mean output shift of rounding.
        search_ranges: Search the ranges that make most of the output's noise, on two frames, by the
            output; for maps of pillars.
        fold: Whether batch norms are folded into convolutions first. Without folding, a run has no
            form in integers and in files.
    """

    quantize_head: bool = False
    quantize_first_layer: bool = False
    plan: Path | None = None
    weight_bits: int = 8
    output_weight_bits: int = 8
    unsigned: bool = False
    rounding: Rounding = "nearest"
    bias_correction: bool = False
    search_ranges: bool = False
    fold: bool = True


def _every_camera() -> tuple[str, ...]:
    from bev_data.cameras import CAMERA_NAMES

    return CAMERA_NAMES


@dataclass(frozen=True)
class PtqConfig(PtqOptions):
    """Everything that decides the result of a run, its frames apart; see `PtqOptions`.

    Args:
        branch: What to quantize; see `TargetOptions`.
        method: How activation ranges are chosen.
        cameras: Names of the cameras to use, in this order.
    """

    branch: Branch = "lidar"
    method: Method = "mse"
    cameras: tuple[str, ...] = field(default_factory=_every_camera)

    @property
    def changes_weights(self) -> bool:
        """Whether the quantized model's weights or biases differ from the float model's."""
        return self.rounding != "nearest" or self.bias_correction

    def check_weights(self, *, needs_folding: str = "") -> None:
        """Refuse settings of the weights that contradict each other.

        Args:
            needs_folding: A requested result that an unfolded model cannot give, such as "files".

        Raises:
            InputError: Names the options.
        """
        for option in ("weight-bits", "output-weight-bits"):
            bits = getattr(self, option.replace("-", "_"))
            if not 4 <= bits <= 8:
                raise InputError(f"--{option} {bits}: weights have 4 to 8 bits")
            if self.plan is not None and bits != 8:
                raise InputError(
                    f"--{option} {bits} with --plan {self.plan}: the plan says the bits of each "
                    "layer; leave one of the two out"
                )
        unknown = unknown_name(Rounding, self.rounding)
        if unknown:
            raise InputError(f"--rounding {unknown}")
        if self.fold:
            return
        if self.changes_weights:
            raise InputError(
                "--no-fold with --rounding gptq or --bias-correction: weights are rounded as they "
                "are deployed, batch norms folded, and convolutions before a batch norm have no "
                "bias to correct; leave --no-fold out"
            )
        if needs_folding:
            raise InputError(
                f"--no-fold: {needs_folding} need batch norms folded into the convolutions; leave "
                "it out"
            )


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
    cameras: tuple[str, ...] = field(default_factory=_every_camera)


Config = TypeVar("Config", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True)
class FrameOptions:
    """Where frames come from: `--points`, or `--dataset` with `--data`.

    Args:
        points: LiDAR frames: .bin, .pcd, .npy, .npz, .feather, NVIDIA .tensor, or folders of them.
        dataset: Data set with cameras and labels, in place of --points: street (made from seeds,
            without files), pandaset, kitti, nuscenes, mmdet3d (an info file of mmdetection3d), or
            files (points files and frame folders of your own).
        data: Folder or file of the data set; files takes several, street none.
        first: First frame, counted from 0; of street, the first seed.
        count: Number of frames from --first on; 0 for all (of street, one).
        conditions: Weather, light or fault of street: rain, fog, night, beams16, beams64, blocked,
            hills or pose_error.
        split: nuScenes' split, such as val or mini_val.
        data_version: nuScenes' version, such as v1.0-trainval.
        classes: New names of nuscenes' or mmdet3d's classes, such as
            vehicle.emergency.police=car bus=truck.
        box_origin: Point of a box that its z gives, in mmdet3d's files of your own data.
        incomplete: Refuse frames with missing images, or skip them.
        cameras: Names of the cameras to use, in this order; mit-bevfusion's six by default (KITTI:
            CAM_FRONT).
        columns: Columns of points files, such as x,y,z,intensity,ring or
            x,y,z,intensity:refl,timestamp_ns:t; or 4 or 5 for a .bin that fits both.
        axes: Directions of the x, y and z of points files, such as forward,left,up (KITTI, ROS). By
            default right,forward,up; for mmdet3d those of the info file's data set.
        dtype: Number type of a .bin, if several fit.
        intensity_scale: Factor that makes a file's intensities 0..255, such as 1 or 0.00389.
        key: Name of the array of points in a .npz.
        nonfinite: Refuse points with NaN and Inf, or drop them.
    """

    points: tuple[Path, ...] = ()
    dataset: DatasetKind | None = None
    data: tuple[Path, ...] = ()
    first: int = 0
    count: int = 0
    conditions: str | None = None
    split: str | None = None
    data_version: str | None = None
    classes: tuple[str, ...] = ()
    box_origin: Literal["centre", "bottom"] | None = None
    incomplete: Literal["refuse", "skip"] = "refuse"
    cameras: tuple[str, ...] = ()
    columns: str | None = None
    axes: str | None = None
    dtype: Literal["float32", "float16", "float64"] | None = None
    intensity_scale: float | None = None
    key: str = "points"
    nonfinite: Literal["raise", "drop"] = "raise"


class Place(TypedDict, total=False):
    """Destination of a run: keywords of every `run_…`.

    Attributes:
        runs: Folder of all runs. Default: "runs".
        name: The run's folder in it. Default: the command's name.
        overwrite: Replace an earlier run of that name.
        command: The command line that repeats the run, for its summary.
    """

    runs: Path
    name: str
    overwrite: bool
    command: str


class DryRun(Exception):
    """Ends a command with --dry-run before it computes or writes anything.

    Attributes:
        folder: The folder that the command would write.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder


@dataclass(frozen=True, kw_only=True)
class ShownOptions:
    """What a command prints.

    Args:
        dry_run: Check the options and list the frames, print what would be read, computed and
            written, and stop.
        quiet: Print the verdict alone, without progress and tables.
        verbose: Print debugging messages too.
    """

    dry_run: bool = False
    quiet: bool = False
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class RunOptions(ShownOptions):
    """Where the run is written.

    Args:
        runs: Folder of all runs.
        name: The run's folder in it.
        overwrite: Replace an earlier run of that name.
        json: Print the run's summary.json with its folder, in place of tables.
    """

    runs: Path = Path("runs")
    name: str | None = None
    overwrite: bool = False
    json: bool = False

    def place(self, command: str) -> Place:
        """The destination; its default name is the command, with a number if it is taken.

        Raises:
            InputError: No run can be written there.
            DryRun: The options ask for no run.
        """
        from bevfusion_quant.run import check_folder

        name = self.name or free_name(self.runs, type(self).__name__.lower())
        if self.dry_run:
            check_folder(self.runs, name, overwrite=self.overwrite)
            raise DryRun(self.runs / name)
        return {"runs": self.runs, "name": name, "overwrite": self.overwrite, "command": command}


@dataclass(frozen=True, kw_only=True)
class BootstrapOptions:
    """How sure the figures by labels are.

    Args:
        resamples: Bootstrap resamples for the intervals of the mean average precision, if frames
            have labels; 0 for none.
        resample_seed: Seed of the resamples.
    """

    resamples: int = 1000
    resample_seed: int = 0

    def bootstrap(self) -> Bootstrap:
        """The argument of the metrics."""
        from bev_data.metrics import Bootstrap

        return Bootstrap(self.resamples, self.resample_seed)


def free_name(runs: Path, stem: str) -> str:
    """`stem`, `stem-2`, `stem-3`, …: the first name without a run in `runs`."""
    number = 1
    while os.path.lexists(runs / (name := stem if number == 1 else f"{stem}-{number}")):
        number += 1
    return name


def config_from(form: type[Config], options: DataclassInstance, **decided: Any) -> Config:
    """The configuration of a command's options, which have the fields of `form`.

    `decided` are values of fields that the options leave open or lack.
    """
    given_values = {one.name: getattr(options, one.name) for one in fields(options)}
    own = {one.name for one in fields(form)}
    return form(
        **{**{name: value for name, value in given_values.items() if name in own}, **decided}
    )


_LARGEST = {"seed": 2**63 - 1, "resample_seed": 2**63 - 1, "resamples": 100_000, "workers": 1024}
_FILES = ("weights", "plan", "start")


def check_options(options: DataclassInstance) -> None:
    """Refuse numbers out of range, unknown names and missing files before anything is read.

    Raises:
        InputError: Names the first such option.
    """
    hints = get_type_hints(type(options), include_extras=True)
    for one in fields(options):
        value, option = getattr(options, one.name), f"--{one.name.replace('_', '-')}"
        unknown = unknown_name(hints[one.name], value) if value != one.default else ""
        if unknown:
            raise InputError(f"{option} {unknown}")
        if isinstance(value, bool):
            continue
        if isinstance(value, int):
            largest = _LARGEST.get(one.name, 2**31 - 1)
            if not 0 <= value <= largest:
                raise InputError(f"{option} {value}: it must be from 0 to {largest}")
        elif isinstance(value, Path) and one.name in _FILES:
            if str(value) not in ("trained", "random") and not value.is_file():
                here = f"no such file in {value.absolute().parent}"
                is_folder = "it is a folder; give the file in it"
                raise InputError(f"{option} {value}: {is_folder if value.is_dir() else here}")
        elif isinstance(value, float) and not isfinite(value):
            raise InputError(f"{option} {value}: it must be a finite number")
