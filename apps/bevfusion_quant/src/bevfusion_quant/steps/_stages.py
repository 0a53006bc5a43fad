"""The model at each stage: float, folded, quantized, calibrated."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from bevfusion.model import (
    PART_PATHS,
    Batch,
    BEVFusion,
    BEVFusionConfig,
    exclude_all_but,
    load_weights,
    random_weights,
)
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.options import Branch, Method, PtqConfig, TargetOptions
from bevfusion_quant.run import Clock
from bevfusion_quant.steps._branches import (
    FOLDED_APART,
    expand_patterns,
    quantized_parts,
    why_float,
)
from bevquant_fusion import FusionResult, Skipped, fuse_parts
from bevquant_qnn import (
    PrecisionPlan,
    QuantConfig,
    QuantizeResult,
    RoundingResult,
    SkippedModule,
    quantize_model,
    round_weights,
)
from bevquant_quantizers import CalibrationReport, calibrate
from bevquant_sparse import is_sparse_conv

LOG = logging.getLogger(__name__)
FIRST_LAYER = (
    "the first sparse convolution: fp16, as NVIDIA deploys it (--quantize-first-layer for int8)"
)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Stage(Generic[Result]):
    """A model, and what was done to get it."""

    model: BEVFusion
    result: Result


def example_batch(config: BEVFusionConfig) -> Batch:
    """A few voxels in the middle of the grid and one grey picture: enough to trace a model with.

    A frame's six cameras and all its voxels would do as well; one camera keeps the memory of
    tracing, where every activation is held, to a sixth.
    """
    lidar, camera = config.lidar, config.camera
    x, y, z = (n // 2 for n in lidar.sparse_shape)
    steps = torch.arange(8, dtype=torch.int32)
    coords = torch.stack([steps * 0, x + steps, y + steps % 3, z + steps % 2], dim=1)
    features = torch.linspace(-1, 1, 8 * lidar.in_channels).reshape(8, lidar.in_channels)
    images = torch.linspace(-1, 1, 3 * camera.image_size[0] * camera.image_size[1])
    images = images.reshape(1, 1, 3, *camera.image_size)
    depth = images[:, :, :1].abs() * camera.dbound[1]
    rows, columns = camera.feature_size
    points = len(torch.arange(*camera.dbound)) * rows * columns
    (low, high, step), (first, last, width) = camera.xbound, camera.ybound
    cells = round((high - low) / step) * round((last - first) / width)
    # A stride prime to the number of cells spreads the points over all of them.
    spread = torch.arange(points) * 7919 % cells
    return Batch(features, coords.contiguous(), 1, images, depth, spread)


def example_like(config: BEVFusionConfig, batch: Batch) -> Batch:
    """`example_batch`, of the sensors that a batch has."""
    absent: dict[str, Any] = {
        name: None for name, given in batch._asdict().items() if given is None
    }
    return example_batch(config)._replace(**absent)


def fill_weights(
    model: BEVFusion, config: TargetOptions, first: Batch, clock: Clock
) -> tuple[dict[str, object], Any]:
    """Weights from the file, or random ones fitted to the first frame.

    Returns:
        Which, and what the model makes of the first frame, where fitting them told.
    """
    if config.weights is None:
        with clock.step("random weights"):
            made = random_weights(model, *first, seed=config.seed)
        about = {
            "source": "random",
            "seed": config.seed,
            "batch_norms_fitted_to": "the first frame",
        }
        return about, made
    with clock.step("load weights"):
        report = load_weights(model, config.weights, layout=config.weight_layout)
    if report.not_used:
        LOG.info("%d entries of other branches are not used", len(report.not_used))
    return {
        "source": str(config.weights),
        "layout": report.layout,
        "loaded": len(report.loaded),
        "not_used": report.not_used,
    }, None


def fuse_branch(model: BEVFusion, example: Batch) -> Stage[FusionResult]:
    """A copy of the float model with every BatchNorm folded into its convolution.

    Each module with a forward of its own is folded by itself, on the inputs that the example gives
    it. The head is folded without: which cells become queries hangs on differences as small as
    rounding, so its outputs before and after cannot be compared one by one.
    """
    result = fuse_parts(model, tuple(example), FOLDED_APART, unchecked=[PART_PATHS["head"]])
    return Stage(cast("BEVFusion", result.model), result)


def keep_batch_norms(model: BEVFusion, example: Batch) -> Stage[FusionResult]:
    """A copy of the float model as it is, with an account of the batch norms that stay."""
    model = copy.deepcopy(model).eval()
    left = tuple(
        Skipped(path, "--no-fold leaves batch norms as they are")
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    )
    return Stage(model, FusionResult(model, fused=(), skipped=left))


def quantize_branch(
    fused: BEVFusion,
    example: Batch,
    branch: Branch = "lidar",
    *,
    method: Method = "mse",
    exclude: Iterable[str] = (),
    with_head: bool = False,
    weight_bits: int = 8,
    first_layer: bool = True,
) -> Stage[QuantizeResult]:
    """A copy of the folded model with quantizers in place, not calibrated yet.

    Args:
        fused: From `fuse_branch`; stays as it is.
        example: Anything the model can run on.
        branch: Which part gets quantizers; of `all` and of detectors every part, the head only
            `with_head`.
        method: "max" puts running-maximum calibrators on activations, the others histograms.
        exclude: Paths or globs to leave float, in full or below the part, such as `conv_input.*`.
        with_head: Quantize the head too; says nothing for a single part.
        weight_bits: Of every quantized weight; activations have 8.
        first_layer: Quantize the first sparse convolution too, which NVIDIA deploys in fp16.
    """
    model = copy.deepcopy(fused)
    parts = quantized_parts(branch, with_head=with_head)
    apart = exclude_all_but(parts, model.parts)
    first = [] if first_layer else first_sparse_conv(model)
    config = QuantConfig(
        weight_bits=weight_bits,
        input_calibrator="max" if method == "max" else "histogram",
        exclude=(*expand_patterns(model, exclude), *apart, *first),
    )
    result = quantize_model(model, config, example_inputs=tuple(example))
    # One line for a part that stays float, not one for each of its layers.
    told = {f"excluded by {pattern!r}" for pattern in apart}
    notes = [
        SkippedModule(PART_PATHS[part], why_float(part, branch))
        for part in model.parts
        if part not in parts
    ]
    rest = [
        SkippedModule(item.path, FIRST_LAYER) if item.path in first else item
        for item in result.skipped
        if item.reason not in told
    ]
    return Stage(model, replace(result, skipped=(*notes, *rest)))


def quantize_as(
    fused: BEVFusion, example: Batch, config: PtqConfig, plan: PrecisionPlan | None
) -> Stage[QuantizeResult]:
    """`quantize_branch` as a run's configuration says, which is read here alone.

    Args:
        fused: From `fuse_branch`; stays as it is.
        example: Anything the model can run on.
        config: Of the run.
        plan: That the run follows; one that names the first sparse convolution decides by itself
            whether that gets quantizers.
    """
    first = first_sparse_conv(fused)
    planned = any(path in group.modules for group in plan or () for path in first)
    return quantize_branch(
        fused,
        example,
        config.branch,
        method=config.method,
        exclude=config.exclude,
        with_head=config.quantize_head,
        weight_bits=config.weight_bits,
        first_layer=config.quantize_first_layer or planned,
    )


def first_sparse_conv(model: nn.Module) -> list[str]:
    """Path of the first sparse convolution; none in a model without."""
    paths = (path for path, module in model.named_modules() if is_sparse_conv(module))
    return list(islice(paths, 1))


def calibrate_branch(
    model: BEVFusion,
    batches: Iterable[Batch],
    *,
    method: Method = "mse",
    resume: Path | None = None,
) -> CalibrationReport:
    """Find every quantizer's range from the batches, in place.

    Several ranks share the batches, and each gets the ranges of one process, bit for bit.

    Args:
        model: The quantized model.
        batches: At least one.
        method: How ranges are chosen.
        resume: File that takes what was collected, and that an interrupted run goes on from.

    Raises:
        ValueError: As `calibrate`; the frame is named where the batches know theirs.
    """
    try:
        return calibrate(model, batches, forward=run_batch, method=method, resume=resume)
    except ValueError as error:
        read = list(getattr(batches, "names", {}).values())
        if not read or not hasattr(error, "__notes__"):  # notes say that a batch was running
            raise
        raise ValueError(f"{read[-1][0]}: {error}") from error


ROUNDING_FRAMES = 16
"""Most frames that rounding reads: it holds all of them, and runs each of them for each layer."""


def round_branch(model: BEVFusion, batches: FrameBatches, config: PtqConfig) -> RoundingResult:
    """Round the weights of a calibrated model and correct its biases, in place.

    `bevquant_qnn.round_weights` on the first 16 frames at most.

    Args:
        model: Calibrated, batch norms folded.
        batches: The calibration frames.
        config: Says which of the two.

    Raises:
        ValueError: A layer's input is NaN or infinite.
    """
    return round_weights(
        model,
        batches.head(min(len(batches), ROUNDING_FRAMES)),
        rounding=config.rounding,
        correct_bias=config.bias_correction,
        forward=run_batch,
    )


def run_batch(model: nn.Module, batch: Any) -> Any:
    """What the model makes of a `Batch`."""
    return model(*batch)
