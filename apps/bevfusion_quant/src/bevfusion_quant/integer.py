"""A quantized model in integer arithmetic, as an INT8 chip computes, beside float and fake."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import bevquant_int8sim
from bev_data.metrics import AccuracyAccumulator
from bevfusion.detectors import example_of
from bevfusion.model import Batch, Detector
from bevfusion.quantization import (
    FloatPart,
    IntegerStage,
    QuantizationEvaluation,
    SavedPart,
    Simulation,
    evaluate_quantized,
    lies_below,
    simulate_detector,
    simulation_text,
)
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.options import Branch
from bevfusion_quant.run import Clock
from bevfusion_quant.stages import quantized_parts, why_float
from bevquant_int8sim import IntegerModel, LayerComparison, simulate
from bevquant_int8sim.program import Float8Layer, Weighted
from bevquant_quantizers.ranks import Shards, current_ranks

__all__ = [
    "FloatPart",
    "IntegerStage",
    "Lowered",
    "SavedPart",
    "Simulation",
    "check_backend",
    "evaluate_models",
    "lower_model",
    "simulate_model",
    "simulation_text",
]


def check_backend(backend: str) -> str:
    """The kernels that `backend` selects on this machine, as text.

    Raises:
        InputError: The backend is not available here.
    """
    try:
        status = bevquant_int8sim.usable_backend(backend)
    except ValueError as error:
        raise InputError(f"--backend {error}: choose --backend auto") from error
    return f"{status.name} ({status.detail})"


@dataclass(frozen=True, eq=False)
class Lowered:
    """The integer model of a calibrated model, its kernels, and the comparison of its layers.

    `evaluate_quantized` feeds the frames to `layers`.
    """

    model: IntegerModel
    backend: str
    layers: LayerComparison


def lower_model(
    float_model: Detector,
    quantized_model: Detector,
    batches: FrameBatches,
    clock: Clock,
    backend: str | None,
) -> Lowered | None:
    """Convert the calibrated model to integers for `simulate_model`; None if `backend` is None.

    Raises:
        InputError: No layer is quantized, a layer has no range, or the backend is not available.
    """
    if backend is None:
        return None
    used = check_backend(backend)
    with clock.step("lower to integers"):
        example = example_of(batches.sizes, batches[0])
        model = lowered(quantized_model, example, backend, verify=False)
        # Every frame is compared behind this, step by step; the first one verifies.
        return Lowered(model, used, LayerComparison(float_model, model, verify=True))


def simulate_model(
    made: Lowered,
    quantized_model: Detector,
    batches: FrameBatches,
    evaluation: QuantizationEvaluation,
    clock: Clock,
    folder: Path,
    *,
    branch: str,
    accuracy: AccuracyAccumulator | None = None,
    shards: Shards | None = None,
) -> Simulation:
    """Run the integer model (`bevfusion.quantization.simulate_detector`) and save it.

    `evaluate_quantized` has compared its layers on the same batches; `evaluation` is its result.
    The first rank writes `integer/` in `folder`. The quantized branch explains why the rest is
    float. `accuracy` receives the detections as "integer".
    """
    with clock.step("run in integers", blame="the integer model cannot run on these frames"):
        simulation = simulate_detector(
            made.model, made.layers, quantized_model, batches, evaluation,
            backend=made.backend,
            reasons=_reasons(quantized_model, cast(Branch, branch)),
            accuracy=accuracy,
            shards=shards,
        )  # fmt: skip
    if not current_ranks().first:
        return simulation
    with clock.step("save integers"):
        return replace(simulation, saved=(_saved(made.model, folder),))


def evaluate_models(
    float_model: Detector,
    quantized_model: Detector,
    low: Lowered | None,
    batches: FrameBatches,
    clock: Clock,
    folder: Path,
    shards: Shards,
    *,
    branch: str,
    accumulator: AccuracyAccumulator | None = None,
    layer_frames: int | None = None,
) -> tuple[QuantizationEvaluation, Simulation | None]:
    """Evaluate the float, fake-quantized and, if present, integer model frame by frame.

    See `evaluate_quantized` and `simulate_model` for the arguments.
    """
    blame = "" if low is None else "float and integer model cannot be compared"
    with clock.step("compare", blame=blame):
        evaluation = evaluate_quantized(
            float_model, quantized_model, batches,
            accuracy=accumulator,
            shards=shards,
            integers=None if low is None else low.layers,
            integer_frames=layer_frames,
        )  # fmt: skip
    if low is None:
        return evaluation, None
    simulation = simulate_model(
        low, quantized_model, batches, evaluation, clock, folder,
        branch=branch,
        accuracy=accumulator,
        shards=shards,
    )  # fmt: skip
    return evaluation, simulation


def _reasons(model: Detector, branch: Branch) -> dict[str, str]:
    heads, paths = model.part_paths.get("head", ()), [path for path, _ in model.named_modules()]
    with_head = any(lies_below(p, head) and "_quantizer" in p for p in paths for head in heads)
    quantized = quantized_parts(branch, model.kind, with_head=with_head)
    left = {part: why_float(part, branch) for part in model.parts if part not in quantized}
    return {**left, "excluded": "it was left without quantizers, as --exclude said"}


def lowered(
    quantized_model: Detector, batch: Batch, backend: str, *, verify: bool = True
) -> IntegerModel:
    """The whole model in integers, verified on the batch unless a comparison follows."""
    try:
        model = simulate(quantized_model, tuple(batch), backend=backend, verify=verify)
    except ValueError as error:
        raise InputError(
            f"the run cannot be simulated in integers: {error}: calibrate again with "
            "bevfusion-quant ptq"
        ) from error
    layers = (Weighted, Float8Layer)
    if not any(isinstance(step, layers) or isinstance(step.target, layers) for step in model.steps):
        first = next(iter(model.float_fallbacks), None)
        why = f" ({first.path or 'the model'}: {first.reason})" if first is not None else ""
        raise InputError(
            f"the run cannot be simulated in integers: none of its layers computes in integers{why}"
            ": correct the cause, or quantize with fewer --exclude"
        )
    return model


def _saved(model: IntegerModel, folder: Path) -> SavedPart:
    (folder / "integer").mkdir()
    try:
        model.save(folder / "integer" / "model")
    except ValueError as error:
        return SavedPart("model", "", str(error))
    return SavedPart("model", "integer/model")
