"""The command line's options: one frozen dataclass for each sub-command."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Literal

from bevfusion_quant._errors import InputError

__all__ = [
    "Command",
    "Compare",
    "Demo",
    "Evaluate",
    "Export",
    "FrameOptions",
    "Ptq",
    "Qat",
    "Report",
    "Sensitivity",
    "Simulate",
    "Train",
    "Tree",
    "check_options",
]

ConfigName = Literal["nuscenes", "tiny"]
Method = Literal["mse", "max", "entropy", "percentile"]
Branch = Literal["camera", "lidar", "fuser", "decoder", "head", "all"]
AnyBranch = Literal[Branch, "lidar-detector", "camera-detector"]
Backend = Literal["auto", "vnni", "portable", "torch"]
Target = Literal["nvidia", "bpu"]
ExportTarget = Literal[
    "tensorrt", "tensorrt10", "tensorrt11", "onnxruntime", "openvino", "autoware", "bpu"
]
MarchName = Literal["bayes", "bernoulli2", "bayes-e"]
Dataset = Literal["street", "pandaset", "kitti", "files", "nuscenes"]


@dataclass(frozen=True, kw_only=True)
class FrameOptions:
    """Where frames come from: `--points`, or `--dataset` with `--data`.

    Args:
        points: LiDAR frames: nuScenes or KITTI .bin, .npz, NVIDIA .tensor, or folders of them.
        dataset: A data set instead, with cameras and labels: street (made from seeds, no files),
            pandaset, kitti, nuscenes, or files (points files and frame folders of your own).
        data: Where the data set lies; files takes several paths, street none.
        first: The first frame to use, counted from 0; the first seed of street.
        count: How many frames from there; 0 for all (one of street).
        split: nuScenes' split, such as val or mini_val.
        data_version: nuScenes' version, such as v1.0-trainval.
        incomplete: What to do with frames of which images are missing.
        cameras: Names of the cameras to use, in this order; mit-bevfusion's six by default (KITTI:
            CAM_FRONT).
        columns: Columns of a .bin, 4 or 5, where the file leaves it open.
        dtype: Number type of a .bin, where the file leaves it open.
        nonfinite: What to do with NaN and Inf points.
    """

    points: tuple[Path, ...] = ()
    dataset: Dataset | None = None
    data: tuple[Path, ...] = ()
    first: int = 0
    count: int = 0
    split: str | None = None
    data_version: str | None = None
    incomplete: Literal["refuse", "skip"] = "refuse"
    cameras: tuple[str, ...] = ()
    columns: Literal[4, 5] | None = None
    dtype: Literal["float32", "float16"] | None = None
    nonfinite: Literal["raise", "drop"] = "raise"


@dataclass(frozen=True)
class Demo:
    """Do all of it on an embedded street scene with six cameras; no download, no data.

    Args:
        config: Sizes of the model: tiny comes trained and takes seconds; nuscenes is
            mit-bevfusion's, with random weights, and takes minutes.
        branch: What to quantize; see `ptq`.
        method: How activation ranges are chosen.
        weights: trained: those that come with the package, by default where it has some for the
            sizes; or random ones.
        seed: Seed of the street and of random weights.
        runs: Folder of all runs.
        name: The run's folder in it; by default demo, demo-2, …
        overwrite: Replace an earlier run of that name.
    """

    config: ConfigName = "tiny"
    branch: Branch = "all"
    method: Method = "mse"
    weights: Literal["trained", "random"] | None = None
    seed: int = 0
    runs: Path = Path("runs")
    name: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class Ptq(FrameOptions):
    """Fold, quantize, calibrate and compare on your own frames.

    Args:
        config: Sizes of the model.
        branch: What to quantize: camera or lidar, that encoder built alone; fuser, decoder or
            head, that part in the whole model; all, the whole model but its head; lidar-detector
            and camera-detector, all but the head of a detector of one sensor, as `train` makes
            them. By default lidar for --points, all for --dataset.
        weights: mit-bevfusion state dict (.pth or .safetensors), or trained for the weights that
            come with the package; random weights without it.
        weight_layout: How that file stores sparse weights; auto takes it from the shapes where they
            allow one layout only.
        target: What is quantized for. nvidia: every part, as TensorRT and libspconv take it. bpu:
            the dense parts for a Horizon BPU (camera backbone and neck, fuser, decoder), the rest
            in float on its CPU.
        march: Of --target bpu, the BPU's architecture: bayes (Journey 5, RDK Ultra; the default),
            bernoulli2 (RDK X3) or bayes-e (RDK X5).
        method: How activation ranges are chosen; mse by default, for a BPU percentile.
        calibration_frames: How many frames, from the first, set the ranges; 0 for all.
        exclude: Paths or globs to leave float, in full or below the part, such as conv_input; for a
            BPU, to run on the CPU.
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
        allow_poor_calibration: End with 0 where the calibration cannot be right too; what is wrong
            with it is told all the same.
        seed: Seed of random weights.
        runs: Folder of all runs.
        name: The run's folder in it; by default ptq, ptq-2, …
        overwrite: Replace an earlier run of that name.
    """

    config: ConfigName = "nuscenes"
    branch: AnyBranch | None = None
    weights: Path | None = None
    weight_layout: Literal["auto", "RSCK", "KRSC", "KCRS"] = "auto"
    target: Target = "nvidia"
    march: MarchName | None = None
    method: Method | None = None
    calibration_frames: int = 0
    exclude: tuple[str, ...] = ()
    quantize_head: bool = False
    quantize_first_layer: bool = False
    plan: Path | None = None
    weight_bits: int = 8
    rounding: Literal["nearest", "gptq"] = "nearest"
    bias_correction: bool = False
    fold: bool = True
    allow_poor_calibration: bool = False
    seed: int = 0
    runs: Path = Path("runs")
    name: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class Evaluate(FrameOptions):
    """Compare a saved run's float and quantized model on other frames; the run stays as it is.

    Args:
        run: The folder of a run that demo or ptq wrote.
        resamples: Where frames have labels, bootstrap resamples for the intervals of the mean
            average precision; 0 for none.
        resample_seed: Seed of the resamples.
        runs: Folder of all runs; the evaluation is a new one.
        name: The evaluation's folder in it; by default evaluate, evaluate-2, …
        overwrite: Replace an earlier run of that name.
    """

    run: Path
    resamples: int = 1000
    resample_seed: int = 0
    runs: Path = Path("runs")
    name: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class Simulate(Evaluate):
    """Run a saved run's model in integer arithmetic on frames, beside float and fake-quantized.

    Args:
        backend: Kernels to run on; auto takes the fastest that is exact here.
        name: The simulation's folder in --runs; by default simulate, simulate-2, …
    """

    backend: Backend = "auto"


@dataclass(frozen=True, kw_only=True)
class Compare(FrameOptions):
    """Judge several runs of one float model by the labels of the same frames, in one pass.

    Args:
        run: Folders of runs that demo, ptq or qat wrote from the same float weights, for NVIDIA.
        integers: Run every run's model in integers, too.
        backend: Kernels for --integers; auto takes the fastest that is exact here.
        resamples: Bootstrap resamples for the intervals; 0 for none.
        resample_seed: Seed of the resamples.
        runs: Folder of all runs; the comparison is a new one.
        name: Its folder in it; by default compare, compare-2, …
        overwrite: Replace an earlier run of that name.
    """

    run: tuple[Path, ...]
    integers: bool = False
    backend: Backend = "auto"
    resamples: int = 1000
    resample_seed: int = 0
    runs: Path = Path("runs")
    name: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Tree:
    """Print the module tree at one stage.

    Args:
        branch: Which part, as in `ptq`.
        stage: float, with BatchNorms folded, or with quantizers in place.
        config: Sizes of the model.
        quantize_head: With --branch all, quantizers in the head too.
    """

    branch: Branch = "lidar"
    stage: Literal["float", "fused", "quantized"] = "float"
    config: ConfigName = "nuscenes"
    quantize_head: bool = False


@dataclass(frozen=True, kw_only=True)
class Train(FrameOptions):
    """Train a float detector on labelled frames; a run that was stopped goes on where it was.

    Of street, training takes the seeds from 1,000,000 + --first on, 1,000 of them unless --count
    says otherwise; of pandaset, the frames numbered below 28.

    Args:
        out: Folder of the run: checkpoint, prepared frames, and in the end weights.safetensors.
        config: Sizes of the model.
        branch: A detector of the LiDAR alone, of the cameras alone (with the LiDAR's depth, as
            mit-bevfusion's view transform reads it), or of both, fused.
        steps: Steps of the optimizer.
        batch: Frames in each step.
        lr: Largest learning rate of the one-cycle schedule.
        weight_decay: AdamW's.
        clip: Gradients are scaled down to this norm.
        flip: Mirror frames along x and y, each in half of the draws.
        rotation: Turn frames by up to this angle [rad].
        scale: Scale frames by up to this share.
        seed: Of weights, order, augmentation and dropout.
        start: Weights to start from; the entries that fit are taken.
        half: Store the weights as float16, norms apart.
        held_out: Streets, from seed 0, to judge the weights by; of pandaset, 0 for none of the
            frames from 28 on, anything else for all.
        resume: Go on from the checkpoint in --out, or begin where there is none.
        device: Where to train, such as cpu or cuda.
        workers: Processes that prepare frames ahead.
        cache: Folder of prepared frames, which runs on the same frames may share; by default in
            --out.
        checkpoint_every: Steps between checkpoints.
    """

    out: Path
    config: ConfigName = "tiny"
    branch: Literal["lidar", "camera", "all"] = "all"
    steps: int = 2000
    batch: int = 4
    lr: float = 2e-3
    weight_decay: float = 0.01
    clip: float = 10.0
    flip: bool = True
    rotation: float = 0.2
    scale: float = 0.05
    seed: int = 0
    start: Path | None = None
    half: bool = False
    held_out: int = 100
    resume: bool = False
    device: str = "cpu"
    workers: int = 1
    cache: Path | None = None
    checkpoint_every: int = 100


@dataclass(frozen=True, kw_only=True)
class Qat(FrameOptions):
    """Train a saved run's quantized model on labelled frames; the run stays as it is.

    Frames to train on are those of `train`: of street, the seeds from 1,000,000 + --first on, 1,000
    of them unless --count says otherwise; of pandaset, the frames numbered below 28.

    Args:
        run: The folder of a run that ptq, demo or qat wrote, with a head, for NVIDIA.
        steps: Steps of the optimizer.
        batch: Frames in each step; each is run by itself.
        lr: Largest learning rate of the one-cycle schedule.
        freeze_after: Steps after which all ranges stand still; 0 leaves them as calibrated. By
            default half of the steps.
        learn_ranges: Learn the ranges by gradient (LSQ) instead of following the largest values.
        distill: Weight in the loss of the distance to the float model's decoder map and heat map; 0
            for none.
        weight_decay: AdamW's.
        clip: Gradients are scaled down to this norm.
        flip: Mirror frames along x and y, each in half of the draws.
        rotation: Turn frames by up to this angle [rad].
        scale: Scale frames by up to this share.
        seed: Of order, augmentation and dropout.
        held_out: Streets, from seed 0, to judge float and trained model by; of pandaset, 0 for none
            of the frames from 28 on, anything else for all.
        resume: Go on from the checkpoint of a run that was stopped, or begin where there is none.
        device: Where to train, such as cpu or cuda.
        workers: Processes that prepare frames ahead.
        cache: Folder of prepared frames, which runs on the same frames may share, those of `train`
            with cameras too; by default in --runs, in the new run's name with .training.
        checkpoint_every: Steps between checkpoints.
        runs: Folder of all runs; the trained run is a new one.
        name: Its folder in it; by default qat, qat-2, …
        overwrite: Replace an earlier run of that name, or forget its checkpoint.
    """

    run: Path
    steps: int = 200
    batch: int = 2
    lr: float = 3e-4
    freeze_after: int | None = None
    learn_ranges: bool = False
    distill: float = 0.0
    weight_decay: float = 0.01
    clip: float = 10.0
    flip: bool = True
    rotation: float = 0.2
    scale: float = 0.05
    seed: int = 0
    held_out: int = 100
    resume: bool = False
    device: str = "cpu"
    workers: int = 1
    cache: Path | None = None
    checkpoint_every: int = 100
    runs: Path = Path("runs")
    name: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class Export(FrameOptions):
    """Write a saved run's model as ONNX files for an engine, and prove them on a frame.

    Without frames one street is made; frames of your own set how many voxels the files can hold.

    Args:
        run: The folder of a run that demo or ptq wrote.
        target: tensorrt: the files of CUDA-BEVFusion, the sparse encoder for libspconv, as
            TensorRT 10 takes them (tensorrt10 is the same). tensorrt11: with the types that
            TensorRT 11 takes from the file. onnxruntime, openvino: all for a CPU. autoware: the
            sparse encoder for Autoware's plugin, of a lidar-detector with decoder and head in one
            file. bpu: of a run with --target bpu, the dense parts for hb_mapper. By default what
            the run was quantized for.
        cpu: Of files for a CPU: vnni for one that multiplies int8 exactly (x86 with VNNI or AMX,
            ARM), any for files that are slower and right everywhere. By default the one at hand.
        runs: Folder of all runs; the export is a new one.
        name: The export's folder in it; by default export, export-2, …
        overwrite: Replace an earlier run of that name.
    """

    run: Path
    target: ExportTarget | None = None
    cpu: Literal["vnni", "any"] | None = None
    runs: Path = Path("runs")
    name: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class Sensitivity(FrameOptions):
    """Measure what each layer's rounding costs a saved run's model; with a budget, plan precisions.

    Args:
        run: The folder of a run that demo or ptq wrote, for NVIDIA.
        metric: sqnr and kl (of the heat map's classes) compare with the float model and need no
            labels; mAP judges the boxes by the frames' labels.
        output: What sqnr looks at: the map before the head, or the head's heat map. By default the
            map, or where the head is quantized the heat map.
        precisions: At which each group of layers is measured alone, and which a plan may choose
            beside float: int8, int16 (activations of 16 bits), int4 (weights of 4). By default
            int8, of a run with --weight-bits 4 int4.
        alone_only: Leave out the second half of the measurement, each group alone left in float.
        budget: time=1.2 for the best score in 1.2 times the int8 model's estimated time, or
            score=35 for the fastest plan that keeps a score; writes plan.json for ptq --plan.
        plan_rounds: Rounds of measuring plans around the estimated one, each with about as many as
            there are groups of layers; 0 for a few plans alone.
        runs: Folder of all runs; the measurement is a new one.
        name: Its folder in it; by default sensitivity, sensitivity-2, …
        overwrite: Replace an earlier run of that name.
    """

    run: Path
    metric: Literal["sqnr", "kl", "mAP"] = "sqnr"
    output: Literal["map", "heatmap"] | None = None
    precisions: tuple[Literal["int4", "int8", "int16"], ...] = ()
    alone_only: bool = False
    budget: str | None = None
    plan_rounds: int = 2
    runs: Path = Path("runs")
    name: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """Put a run and what was measured of it on one page to sign; nothing is measured anew.

    Of the finished folders in --runs those are taken that were made with the run's weights, of each
    kind the newest. What nobody measured is named, with the command that would.

    Args:
        run: The folder of a run that demo, ptq or qat wrote.
        qat: A run of qat from the same float model, to stand beside.
        bpu: A run of ptq --target bpu of the same float model, to stand beside.
        take: Folders of evaluate, simulate, sensitivity, export or compare to take instead of the
            newest.
        pdf: Print the page to report.pdf, with Chromium or Chrome.
        browser: The browser to print with; by default the first on the path.
        runs: Folder of all runs; the page gets one of its own.
        name: Its folder in it; by default report, report-2, …
        overwrite: Replace an earlier page of that name.
    """

    run: Path
    qat: Path | None = None
    bpu: Path | None = None
    take: tuple[Path, ...] = ()
    pdf: bool = False
    browser: Path | None = None
    runs: Path = Path("runs")
    name: str | None = None
    overwrite: bool = False


Command = (
    Demo | Ptq | Evaluate | Compare | Sensitivity | Simulate | Export | Report | Train | Qat | Tree
)


_LARGEST = {"seed": 2**63 - 1, "resample_seed": 2**63 - 1, "resamples": 100_000, "workers": 1024}


def check_options(options: Command) -> None:
    """Refuse numbers that no command can use, before anything is read.

    Raises:
        InputError: The first of them, by its option.
    """
    for field in fields(options):
        value, option = getattr(options, field.name), f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            continue
        if isinstance(value, int):
            largest = _LARGEST.get(field.name, 2**31 - 1)
            if not 0 <= value <= largest:
                raise InputError(f"{option} {value}: it must be from 0 to {largest}")
        elif isinstance(value, float) and not isfinite(value):
            raise InputError(f"{option} {value}: it must be a finite number")
