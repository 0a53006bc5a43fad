"""The one plan of precisions that calibration, comparison, simulation and export obey."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from bevfusion_quant._errors import InputError
from bevquant_qnn import PrecisionPlan, apply_precision

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
        wide_groups = "; ".join(f"{', '.join(group.modules)} ({group.precision})" for group in wide)
        raise InputError(
            f"{where} cannot be written as ONNX files, which hold int8 and float alone: "
            f"{wide_groups}: "
            "make a plan with sensitivity --precisions int8, and quantize again with ptq --plan"
        )
