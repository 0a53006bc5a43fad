"""The one plan of precisions that calibration, comparison, simulation and export obey."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from bevfusion_quant._errors import InputError
from bevquant_qnn import PrecisionPlan, SkippedModule, apply_precision

PLAN_FILE = "plan.json"
# What ONNX files can hold; other integers have no QuantizeLinear or no kernel on their targets.
_IN_FILES = ("int8", "float")


def read_plan(path: Path) -> PrecisionPlan:
    """A plan as `bevfusion-quant sensitivity --budget` writes it.

    Raises:
        InputError: There is no such file, or it holds something else.
    """
    try:
        return PrecisionPlan.load(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(
            f"{path} is no plan of precisions: {reason}: give the plan.json that bevfusion-quant "
            "sensitivity --budget wrote"
        ) from error


def before_calibration(plan: PrecisionPlan) -> PrecisionPlan:
    """The plan under which ranges are searched: 8 bits in place of other integers.

    So every layer of 8 bits gets the range that it has without a plan, by whatever method; wider
    ranges come from the same values afterwards, when the plan itself is applied.
    """
    groups = (
        group if group.precision == "float" else replace(group, precision="int8") for group in plan
    )
    return replace(plan, groups=tuple(groups))


def apply_plan(model: nn.Module, plan: PrecisionPlan) -> None:
    """Set the model's quantizers.

    Raises:
        InputError: The plan is another model's.
    """
    try:
        apply_precision(model, plan)
    except ValueError as error:
        raise InputError(
            f"the plan cannot be applied: {error}; quantize with the branch and --exclude of the "
            "run that it was made from"
        ) from error


def planned_layers(plan: PrecisionPlan) -> tuple[SkippedModule, ...]:
    """What the plan makes other than int8, a line for each layer, for the run's account."""
    reasons = {
        "float": "the plan leaves it in float",
        "int16": "the plan gives it activations of 16 bits, weights of 8",
        "int4": "the plan gives it weights of 4 bits, activations of 8",
    }
    return tuple(
        SkippedModule(path, reasons[group.precision])
        for group in plan
        if group.precision in reasons
        for path in group.modules
    )


def refuse_in_files(plan: PrecisionPlan, where: str | Path) -> None:
    """Refuse to write files of a plan with precisions that files cannot hold.

    Args:
        plan: Of the run.
        where: The run, for the message.

    Raises:
        InputError: Naming the layers.
    """
    wide = [group for group in plan if group.precision not in _IN_FILES]
    if wide:
        told = "; ".join(f"{', '.join(group.modules)} ({group.precision})" for group in wide)
        raise InputError(
            f"{where} cannot be written as ONNX files, which hold int8 and float alone: {told}: "
            "make a plan with sensitivity --precisions int8, and quantize again with ptq --plan"
        )
