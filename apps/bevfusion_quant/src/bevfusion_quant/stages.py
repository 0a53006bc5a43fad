"""Parts of each `--branch`, and the model at each stage: float, folded, quantized, calibrated."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from torch import nn

from bevfusion.detectors import DETECTORS, find_detector, is_foreign
from bevfusion.model import PARTS, Batch, Detector, Sizes, load_weights, random_weights
from bevfusion.quantization import first_sparse_conv, fuse_detector, quantize_detector
from bevfusion_quant._errors import InputError
from bevfusion_quant.options import Branch, PtqConfig, TargetOptions
from bevfusion_quant.run import Clock
from bevquant_fusion import FusionResult, Skipped
from bevquant_qnn import PrecisionPlan, QuantizeResult

LOG = logging.getLogger(__name__)
FIRST_LAYER = (
    "the first sparse convolution: fp16, as NVIDIA deploys it (--quantize-first-layer for int8)"
)
Result = TypeVar("Result")


_DETECTORS = {
    "lidar-detector": ("lidar", "decoder", "head"),
    "camera-detector": ("camera", "decoder", "head"),
}


def sizes_of(model: str, config: str, weights: Path | None = None) -> Sizes:
    """Sizes of `--model` and `--config`; a detector in its own code is loaded, with the weights."""
    configs = find_detector(model, weights).configs
    if config not in configs:
        known = ", ".join(configs)
        raise InputError(f"--config {config}: expected one of {known} of --model {model}")
    sizes: Sizes = configs[config]
    return sizes


def built_parts(branch: Branch, model: str = "bevfusion") -> tuple[str, ...]:
    """Parts of the model that a branch needs: those of one sensor, of a detector, or all.

    Raises:
        InputError: The model lacks a part.

    Example:
        >>> built_parts("lidar"), built_parts("fuser")
        (('lidar',), ('camera', 'lidar', 'fuser', 'decoder', 'head'))
        >>> built_parts("all", "centerpoint"), built_parts("all", "package.module:function")
        (('lidar', 'decoder', 'head'), ('network',))
    """
    every = DETECTORS[model].parts if model in DETECTORS else ("network",)
    parts = (branch,) if branch in ("camera", "lidar") else _DETECTORS.get(branch, every)
    wanted = {*parts, *({branch} if branch in PARTS else ())}
    if not wanted.issubset(every):
        raise InputError(
            f"--branch {branch}: --model {model} has {', '.join(every)} and nothing else; choose "
            "one of these, or all"
        )
    return parts


def is_detector(branch: Branch) -> bool:
    """Whether several parts are quantized, so the head may be one of them."""
    return branch == "all" or branch in _DETECTORS


def reads_images(branch: Branch, model: str = "bevfusion") -> bool:
    """Whether a built part reads the cameras."""
    return "camera" in built_parts(branch, model)


def quantized_parts(
    branch: Branch, model: str = "bevfusion", *, with_head: bool = False
) -> tuple[str, ...]:
    """The parts that get quantizers.

    `all` and the detectors of one sensor leave BEVFusion's head float, as NVIDIA's deployment
    does, unless `with_head`.
    """
    if not is_detector(branch):
        return (branch,)
    with_head = with_head or model not in DETECTORS or not DETECTORS[model].head_in_float
    return tuple(part for part in built_parts(branch, model) if with_head or part != "head")


def why_float(part: str, branch: Branch) -> str:
    """The reason why a built part stays float, for the report."""
    if not is_detector(branch):
        return f"--branch {branch} quantizes the {branch} alone"
    return (
        "the head stays float, as in NVIDIA's deployment, where it runs in fp16; --branch head "
        "quantizes it alone, --quantize-head along with the rest"
    )


@dataclass(frozen=True)
class Stage(Generic[Result]):
    """A model and an account of the step that made it."""

    model: Detector
    result: Result


def fill_weights(
    model: Detector, config: TargetOptions, first: Batch, clock: Clock
) -> tuple[dict[str, object], Any]:
    """Load weights from the file, or fit random ones to the first frame.

    A detector in its own code has its weights already.

    Returns:
        An account of the weights, and the model's output on the first frame if it was computed.
    """
    if is_foreign(config.model):  # which was built with them
        source = "its own" if config.weights is None else str(config.weights)
        return {"source": source}, None
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
        report = load_weights(
            model, config.weights, layout=config.weight_layout, key=config.weight_entry
        )
    LOG.info("%s: %s", config.weights, report)
    return {
        "source": str(config.weights),
        "layout": report.layout,
        "names": report.names,
        "entry": report.checkpoint.entry if report.checkpoint else "",
        "loaded": len(report.loaded),
        "not_used": report.not_used,
    }, None


def fuse_branch(model: Detector, example: Batch) -> Stage[FusionResult]:
    """A copy of the float model with every batch norm folded into its convolution."""
    result = fuse_detector(model, example)
    return Stage(cast("Detector", result.model), result)


def keep_batch_norms(model: Detector, example: Batch) -> Stage[FusionResult]:
    """A copy of the float model, with a list of the batch norms that stay."""
    model = copy.deepcopy(model).eval()
    left = tuple(
        Skipped(path, "--no-fold leaves batch norms as they are")
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    )
    return Stage(model, FusionResult(model, fused=(), skipped=left))


def quantize_branch(
    fused: Detector,
    example: Batch,
    branch: Branch = "lidar",
    *,
    with_head: bool = False,
    **how: Any,
) -> Stage[QuantizeResult]:
    """A copy of the folded model with quantizers, not calibrated yet.

    Args:
        fused: Result of `fuse_branch`; not changed.
        example: A batch that the model can run on.
        branch: Part that gets quantizers; for `all` and detectors every part, the head only
            `with_head`.
        with_head: Quantize the head too; without effect on a single part.
        **how: method, exclude and other arguments of `bevfusion.quantization.quantize_detector`.
    """
    parts = quantized_parts(branch, fused.kind, with_head=with_head)
    why = {part: why_float(part, branch) for part in fused.parts}
    reasons = {**why, "first layer": FIRST_LAYER}
    result = quantize_detector(fused, example, parts, reasons=reasons, **how)
    return Stage(cast("Detector", result.model), result)


def quantize_as(
    fused: Detector, example: Batch, config: PtqConfig, plan: PrecisionPlan | None
) -> Stage[QuantizeResult]:
    """`quantize_branch` with the arguments of a run's configuration."""
    first = first_sparse_conv(fused)
    # A plan that names the first sparse convolution decides whether that layer gets quantizers.
    planned = any(path in group.modules for group in plan or () for path in first)
    parts = quantized_parts(config.branch, fused.kind, with_head=config.quantize_head)
    # The outputs of a detector in other code count as those of a head.
    apart = {"head", "network"}.intersection(parts) and (
        config.output_weight_bits != config.weight_bits
    )
    return quantize_branch(
        fused,
        example,
        config.branch,
        method=config.method,
        exclude=config.exclude,
        with_head=config.quantize_head,
        weight_bits=config.weight_bits,
        output_weight_bits=config.output_weight_bits if apart else None,
        unsigned=config.unsigned,
        first_layer=config.quantize_first_layer or planned,
    )
