"""The detector folded, quantized, calibrated and rounded, any of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

from torch import Tensor, nn

from bevfusion.evaluation import FrameBatches
from bevfusion.model import Batch, Detector
from bevquant_fusion import FusionResult, fuse_model, fuse_parts
from bevquant_qnn import (
    QuantConfig,
    QuantizeResult,
    RoundingResult,
    SkippedModule,
    quantize_model,
    round_weights,
)
from bevquant_quantizers import CalibrationReport, calibrate
from bevquant_sparse import is_sparse_conv

_ADDED = ("quant_add", "quant_concat", "residual_quantizer")


def fuse_detector(
    model: Detector, example: Batch, state: Mapping[str, Tensor] | None = None
) -> FusionResult:
    """A copy of the float model with every BatchNorm folded into its convolution.

    Each module with a forward of its own is folded by itself, on the inputs that the example gives
    it. BEVFusion's head is folded without: which cells become queries hangs on differences as small
    as rounding, so its outputs before and after cannot be compared one by one.

    Args:
        model: In float; stays as it is.
        example: Anything that it can run on.
        state: Of the folded model, where only its modules are wanted. Which batch norms are gone is
            told by their structure, in a quarter of the time that it takes to capture and compare
            them; where the state says otherwise, by capturing.
    """
    if state is not None:
        result = fuse_model(model)
        names = set(result.model.state_dict())
        norms = {name for name in state if name.endswith(".running_var")}
        if norms <= names <= set(state):
            return result
    return fuse_parts(model, tuple(example), model.folded_apart, unchecked=model.chooses)


def quantize_detector(
    fused: Detector,
    example: Batch,
    parts: Iterable[str],
    *,
    method: str = "mse",
    exclude: Iterable[str] = (),
    first_layer: bool = True,
    reasons: Mapping[str, str] | None = None,
    **settings: Any,
) -> QuantizeResult:
    """A copy of the folded model with quantizers in some of its parts, not calibrated yet.

    Args:
        fused: From `fuse_detector`; stays as it is.
        example: Anything the model can run on.
        parts: What gets quantizers: any of `bevfusion.model.PARTS` that the model has.
        method: "max" puts running-maximum calibrators on activations, others histograms.
        exclude: Paths or globs to leave float, in full or below the part, such as `conv_input.*`.
        first_layer: Quantize the first sparse convolution too, which NVIDIA deploys in fp16.
        reasons: Why a part stays float, by its name, and "first layer" why that does: what the
            result's `skipped` tells, a line for each.
        **settings: weight_bits and whatever else `bevquant_qnn.QuantConfig` has.

    Raises:
        InputError: A part that the model does not have.
    """
    given_reasons = reasons or {}
    quantized = tuple(parts)
    apart = fused.paths_outside(quantized)
    kept = {} if quantized == ("lidar",) else fused.kept_in_float
    first = [] if first_layer else first_sparse_conv(fused)
    config = QuantConfig(
        input_calibrator="max" if method == "max" else "histogram",
        exclude=(*expand_patterns(fused, exclude), *apart, *kept, *first),
        **settings,
    )
    result = quantize_model(fused, config, example_inputs=tuple(example))
    # One line for a part that stays float, not one for each of its layers.
    named = {f"excluded by {pattern!r}" for pattern in (*apart, *kept)}
    skipped = [
        SkippedModule(path, given_reasons.get(part, "not among the parts to quantize"))
        for part in fused.parts
        if part not in quantized
        for path in fused.part_paths[part]
    ]
    skipped += [SkippedModule(path, why) for path, why in kept.items() if path not in apart]
    why = given_reasons.get("first layer", "the first sparse convolution: fp16, as NVIDIA has it")
    skipped += [
        SkippedModule(item.path, why) if item.path in first else item
        for item in result.skipped
        if item.reason not in named
    ]
    return replace(result, skipped=tuple(skipped))


def calibrate_detector(model: Detector, batches: Iterable[Batch], **how: Any) -> CalibrationReport:
    """Find every quantizer's range from the batches, in place.

    Several ranks share the batches, and each gets the ranges of one process, bit for bit.

    Args:
        model: The quantized model.
        batches: At least one.
        **how: method, resume and whatever else `bevquant_quantizers.calibrate` takes.

    Raises:
        ValueError: As `bevquant_quantizers.calibrate`; of `FrameBatches` the frame is named.
    """
    try:
        return calibrate(model, batches, forward=_run, **how)
    except ValueError as error:
        read = list(getattr(batches, "names", {}).values())
        if not read or not hasattr(error, "__notes__"):  # notes say that a batch was running
            raise
        raise ValueError(f"{read[-1][0]}: {error}") from error


ROUNDING_FRAMES = 16
"""Most frames that rounding reads: it holds all of them, and runs each of them for each layer."""


def round_detector(model: Detector, batches: FrameBatches, **how: Any) -> RoundingResult:
    """Round the weights of a calibrated model and correct its biases, in place.

    `bevquant_qnn.round_weights` on the first 16 frames at most.

    Args:
        model: Calibrated, batch norms folded.
        batches: The calibration frames.
        **how: rounding and correct_bias of `round_weights`.

    Raises:
        ValueError: A layer's input is NaN or infinite.
    """
    frames = batches.head(min(len(batches), ROUNDING_FRAMES))
    return round_weights(model, frames, forward=_run, **how)


def _run(model: nn.Module, batch: Any) -> Any:
    return model(*batch)


def first_sparse_conv(model: nn.Module) -> list[str]:
    """Path of the first sparse convolution; none in a model without."""
    paths = (path for path, module in model.named_modules() if is_sparse_conv(module))
    return list(islice(paths, 1))


def expand_patterns(model: nn.Module, patterns: Iterable[str]) -> tuple[str, ...]:
    """Full paths or globs for patterns that leave the part's own path out.

    `conv_input` becomes `encoders.lidar.backbone.conv_input`, `layer1.*` the layers of the camera's
    backbone. A pattern that names modules as it stands is kept, and so is one that names none, for
    `quantize_model` to refuse.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    expanded: list[str] = []
    apart = getattr(model, "folded_apart", ())
    outer = {path.rpartition(".")[0] for path in apart} - {""}
    outer |= {path.rpartition(".")[0] for path in outer} - {""}
    # Those that a pattern may leave out.
    prefixes = (*apart, *sorted(outer, key=lambda path: (-path.count("."), path)))
    for pattern in patterns:
        candidates = [pattern, *(f"{prefix}.{pattern}" for prefix in prefixes)]
        owner, _, name = pattern.rpartition(".")
        if owner and name.startswith(_ADDED):  # not there yet: its owner is
            known = [c for c in candidates if _names(c.rpartition(".")[0], paths)]
        else:
            known = [c for c in candidates if _names(c, paths)]
        expanded += [pattern] if pattern in known else known or [pattern]
    return tuple(dict.fromkeys(expanded))


def _names(pattern: str, paths: list[str]) -> bool:
    return bool(pattern) and any(fnmatchcase(path, pattern) for path in paths)
