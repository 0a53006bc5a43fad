"""The plan of precisions that calibration, comparison, simulation and export follow."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from bevfusion_quant._errors import InputError
from bevquant_qnn import PrecisionPlan, apply_precision

PLAN_FILE = "plan.json"
# What ONNX files can hold; other integers have no QuantizeLinear or no kernel on their targets. FP8
# layers that a target does not take are refused by its exporter.
_IN_FILES = ("int8", "fp8", "float")


def read_plan(path: Path) -> PrecisionPlan:
    """Read a plan of `bevfusion-quant sensitivity --budget`.

    Raises:
        InputError: The file is missing or holds no plan.
    """
    try:
        return PrecisionPlan.load(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(
            f"{path} is no plan of precisions: {reason}: give the plan.json that bevfusion-quant "
            "sensitivity --budget wrote"
        ) from error


def apply_plan(model: nn.Module, plan: PrecisionPlan) -> None:
    """Set the model's quantizers to the plan's precisions.

    Raises:
        InputError: The plan belongs to another model.
    """
    try:
        apply_precision(model, plan)
    except ValueError as error:
        raise InputError(
            f"the plan cannot be applied: {error}; quantize with the branch and --exclude of the "
            "run that it was made from"
        ) from error


def refuse_in_files(plan: PrecisionPlan, where: str | Path) -> None:
    """Refuse a plan with precisions that files cannot hold.

    Args:
        plan: Plan of the run.
        where: Name of the run, for the message.

    Raises:
        InputError: Names the layers.
    """
    wide = [group for group in plan if group.precision not in _IN_FILES]
    if wide:
        wide_groups = "; ".join(f"{', '.join(group.modules)} ({group.precision})" for group in wide)
        raise InputError(
            f"{where} cannot be written as ONNX files, which hold int8, fp8 and float: "
            f"{wide_groups}: "
            "make a plan with sensitivity --precisions int8, and quantize again with ptq --plan"
        )
