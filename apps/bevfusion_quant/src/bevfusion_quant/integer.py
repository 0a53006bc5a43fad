"""A quantized model in integer arithmetic: what an INT8 chip computes, beside float and fake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

import bevquant_int8sim
from bev_data.metrics import AccuracyTally, agreement_text, record_table
from bevfusion.model import PART_PATHS, Batch, BEVFusion, BEVFusionConfig, example_like
from bevfusion.quantization import (
    FloatIsland,
    IntegerStage,
    Judgement,
    SavedPart,
    Simulation,
    in_integers,
    integer_stages,
    lies_below,
    simulate_detector,
)
from bevfusion_quant._errors import InputError
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.options import Backend, Branch
from bevfusion_quant.run import Clock
from bevfusion_quant.steps import quantized_parts, why_float
from bevquant_int8sim import IntegerModel, LayerComparison, LayerRow, simulate
from bevquant_quantizers.ranks import Shards, current_ranks

__all__ = [
    "QUERIES",
    "Backend",
    "FloatIsland",
    "IntegerStage",
    "Lowered",
    "SavedPart",
    "Simulation",
    "check_backend",
    "in_integers",
    "integer_stages",
    "lower_model",
    "simulate_model",
    "simulation_text",
]


def check_backend(backend: str) -> str:
    """Which kernels `backend` means on this machine, as text.

    Raises:
        InputError: It cannot be used here.
    """
    name = backend
    if backend == "auto":
        name = bevquant_int8sim.choose_backend(
            "auto", torch.device("cpu"), torch.int8, "--backend auto"
        )
    try:
        (status,) = bevquant_int8sim.backend_report(name)
    except ValueError:
        why = "it is unknown"
    else:
        if status.available:
            return f"{status.name} ({status.detail})"
        why = status.detail
    raise InputError(f"--backend {backend} cannot be used here: {why}: choose --backend auto")


@dataclass(frozen=True, eq=False)
class Lowered:
    """The calibrated model in integers, and what compares its layers.

    Attributes:
        model: The integer model.
        backend: Its kernels, and the instructions they use.
        layers: With the float and the fake-quantized model; `judge` gives it the frames.
    """

    model: IntegerModel
    backend: str
    layers: LayerComparison


def lower_model(
    float_model: BEVFusion,
    quantized_model: BEVFusion,
    batches: FrameBatches,
    config: BEVFusionConfig,
    clock: Clock,
    backend: str | None,
) -> Lowered | None:
    """Lower the calibrated model for `simulate_model`; nothing where `backend` is None.

    Raises:
        InputError: No layer of the model is quantized, one has no range, or the backend is not
            there.
    """
    if backend is None:
        return None
    used = check_backend(backend)
    with clock.step("lower to integers"):
        # Every frame is compared behind this, step by step.
        model = lowered(quantized_model, example_like(config, batches[0]), backend)
        return Lowered(model, used, bevquant_int8sim.LayerComparison(float_model, model))


def simulate_model(
    made: Lowered,
    quantized_model: BEVFusion,
    batches: FrameBatches,
    config: BEVFusionConfig,
    judgement: Judgement,
    clock: Clock,
    folder: Path,
    *,
    branch: str,
    accuracy: AccuracyTally | None = None,
    shards: Shards | None = None,
) -> Simulation:
    """Run the integer model (`bevfusion.quantization.simulate_detector`), and save it.

    Args:
        made: From `lower_model`, its layers compared by `judge`.
        quantized_model: The calibrated model.
        batches: At least one.
        config: Sizes.
        judgement: Of the same models on the same batches.
        clock: Times the steps.
        folder: Where the first rank writes `integer/`.
        branch: What the run quantized; says why the rest is float.
        accuracy: Is handed the integer model's detections, as "integer".
        shards: Keeps what is finished while several ranks work.
    """
    with clock.step("run in integers", blame="the integer model cannot run on these frames"):
        simulation = simulate_detector(
            made.model, made.layers, quantized_model, batches, config, judgement,
            backend=made.backend,
            reasons=_reasons(quantized_model, cast(Branch, branch)),
            accuracy=accuracy,
            shards=shards,
        )  # fmt: skip
    if not current_ranks().first:
        return simulation
    with clock.step("save integers"):
        return replace(simulation, saved=(_saved(made.model, folder),))


def _reasons(model: BEVFusion, branch: Branch) -> dict[str, str]:
    """Why parts and layers of the quantized model stay float."""
    head, paths = PART_PATHS["head"], [path for path, _ in model.named_modules()]
    with_head = any(lies_below(path, head) and "_quantizer" in path for path in paths)
    quantized = quantized_parts(branch, with_head=with_head)
    left = {part: why_float(part, branch) for part in model.parts if part not in quantized}
    return {**left, "excluded": "it was left without quantizers, as --exclude said"}


def lowered(quantized_model: BEVFusion, batch: Batch, backend: str) -> IntegerModel:
    """The whole model in integers.

    Raises:
        InputError: Nothing in it computes in integers, or ranges are missing.
    """
    try:
        model = simulate(quantized_model, tuple(batch), backend=backend)
    except ValueError as error:
        raise InputError(
            f"the run cannot be simulated in integers: {error}: calibrate again with "
            "bevfusion-quant ptq"
        ) from error
    if not any(step.op in _LAYERS for step in model.steps):
        raise InputError(
            "the run cannot be simulated in integers: none of its layers is quantized: quantize "
            "with bevfusion-quant ptq and fewer --exclude"
        )
    return model


def _saved(model: IntegerModel, folder: Path) -> SavedPart:
    (folder / "integer").mkdir()
    try:
        model.save(folder / "integer" / "model")
    except ValueError as error:
        return SavedPart("model", "", str(error))
    return SavedPart("model", "integer/model")


_LAYERS = frozenset({"sparse_conv", "conv", "conv_transpose", "linear"})


QUERIES = (
    "Behind the head's choice of queries the models may look at different places of the map; "
    "their figures there say little."
)
_LONGEST = 46


def simulation_text(simulation: Simulation, *, layers: bool) -> str:
    """What departs first, then tables: layers if wanted, stages, detections; kernels and time."""
    parts = ["\n".join(verdict(simulation)), _stage_table(simulation)]
    if layers:
        computed = [row for row in simulation.layers if in_integers(row)]
        floats = len(simulation.layers) - len(computed)
        counted = [island.share for island in simulation.islands if island.share is not None]
        much = f" with {100 * sum(counted):.2g} % of the operations" if counted else ""
        steps = f"\nand {_counted(floats, 'step')} in float{much}; the page says why"
        more = steps if floats else ""
        parts.insert(0, _layer_table(computed) + more)
    if simulation.agreement:
        detections = agreement_text(simulation.agreement, simulation.found, "integer")
        parts += ["Detections, float against integer, same class", detections]
    seconds = ", ".join(f"{s:.2f}" for s in simulation.frame_seconds[:8])
    more = " …" if len(simulation.frame_seconds) > 8 else ""
    parts.append(
        f"Kernels: {simulation.backend}; seconds in integers, frame by frame: {seconds}{more}"
    )
    return "\n\n".join(parts)


def verdict(simulation: Simulation) -> list[str]:
    """Which layer departs first and by how much; which layers are off by themselves, and why."""
    first = simulation.first_departure
    text = "Integer and fake-quantized results agree within one step everywhere."
    if first is not None:
        text = (
            f"{first.path} ({first.op}) departs first: up to {_counted(first.max_steps, 'step')} "
            f"from the fake-quantized result, {100 * (first.off or 0):.2g} % of its values differ; "
            f"on the same input {_up_to(first.forced_max_steps)}."
        )
    lines = [text]
    if simulation.wrong:
        lines.append(f"WRONG on the same input: {_named(simulation.wrong)}.")
    for row in simulation.explained:
        steps = _counted(row.forced_max_steps, "step")
        lines.append(f"On the same input {row.path} is {steps} off: {row.why}.")
    if len(lines) == 1:
        lines.append("On the same input every layer agrees within one step.")
    if any(row.path.startswith("heads.") and in_integers(row) for row in simulation.layers):
        lines.append(QUERIES)
    return lines


def _named(rows: Sequence[LayerRow]) -> str:
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    named = (f"{row.path} ({_counted(row.forced_max_steps, 'step')})" for row in rows[:5])
    return ", ".join(named) + more


def _up_to(steps: int | None) -> str:
    return f"up to {_counted(steps, 'step')}" if steps else "none"


def _counted(number: int | None, thing: str) -> str:
    return f"{number or 0} {thing}{'s' * (number != 1)}"


def _stage_table(simulation: Simulation) -> str:
    columns = {
        "stage": "{title}",
        "int": "{integers}",
        "float": "{floats}",
        "fake dB": "{fake_sqnr_db:.2f}",
        "int dB": "{integer_sqnr_db:.2f}",
        "max steps": "{max_steps:.0f}",
        "mean steps": "{mean_steps:.4f}",
        "same input": "{forced_max_steps:.0f}",
    }
    return record_table(simulation.stages, columns)


def _layer_table(rows: Sequence[LayerRow]) -> str:
    columns = {
        "layer": "{path}",
        "step": "{op}",
        "fake dB": "{fake_sqnr_db:.1f}",
        "int dB": "{integer_sqnr_db:.1f}",
        "cosine": "{integer_cosine:.4f}",
        "max": "{max_steps:.0f}",
        "mean": "{mean_steps:.3f}",
        "off %": "{off:100*.2f}",
        "same": "{forced_max_steps:.0f}",
        "sat %": "{saturated:100*.2f}",
        "bits": "{peak_bits:.0f}",
    }
    shown = [replace(row, path=_short(row.path), op=row.op.removesuffix(" + ReLU")) for row in rows]
    return record_table(shown, columns)


def _short(path: str) -> str:
    """The beginning of a long path is cut, the layer's own name stays."""
    short = path.removeprefix("encoders.").replace(".encoder_layers.", ".")
    return short if len(short) <= _LONGEST else "…" + short[1 - _LONGEST :]
