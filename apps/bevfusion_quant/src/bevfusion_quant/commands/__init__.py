"""The sub-commands of `bevfusion-quant`: options, action, output.

tyro reads the options' classes; their docstrings are the help. Libraries are imported when a
command is executed, so help and errors in options are fast.
"""

from __future__ import annotations

from typing import get_args

from bevfusion_quant._errors import InputError
from bevfusion_quant.commands.ptq import Demo, Ptq
from bevfusion_quant.commands.saved import Compare, Evaluate, Export, Report, Sensitivity, Simulate
from bevfusion_quant.commands.training import Qat, Train
from bevfusion_quant.commands.tree import Tree

__all__ = ["COMMANDS", "Command", "check_processes"]

Command = (
    Demo | Ptq | Evaluate | Compare | Sensitivity | Simulate | Export | Report | Train | Qat | Tree
)
COMMANDS: tuple[type[Command], ...] = get_args(Command)

_SHARED = (Ptq, Evaluate, Compare, Sensitivity, Qat)


def check_processes(options: Command, world: int) -> None:
    """Refuse several processes for a command that runs in one.

    Raises:
        InputError: There are several processes.
    """
    for_bpu = getattr(options, "target", None) == "bpu"
    if world > 1 and (for_bpu or not isinstance(options, _SHARED)):
        name = type(options).__name__.lower() + (" --target bpu" if for_bpu else "")
        raise InputError(
            f"{name} runs in one process, and {world} were started: start it without torchrun or "
            "srun; ptq, evaluate, simulate, compare, sensitivity and qat share their frames"
        )
