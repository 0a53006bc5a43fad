"""A program as text."""

from __future__ import annotations

import torch

from bevquant_hybrid.runtime._program import Argument, Operand, Port, Program, Shape, Step

__all__ = ["listing", "type_text"]


def listing(program: Program) -> str:
    """Print inputs, steps with the types of their results, and outputs."""
    size = sum(tensor.nbytes for tensor in program.constants.values())
    lines = [
        f"{program.name}: {len(program.steps)} operators for {program.march}, "
        f"{len(program.constants)} constants of {size} bytes",
        "integers for bevquant_hybrid.runtime, no binary for a BPU",
        "inputs",
        *(f"  {_port(port, program)}" for port in program.inputs),
        "operators",
        *(f"  {_step(step, program)}" for step in program.steps),
        "outputs",
        *(
            f"  {_port(port, program)} = {_argument(port.operand, program)}"
            for port in program.outputs
        ),
    ]
    return "\n".join(lines)


def type_text(dtype: torch.dtype, shape: Shape) -> str:
    """``int8[1, 3, 8, 8]``; of a size that the data decide, ``int64[…]``."""
    sizes = "…" if shape is None else ", ".join(map(str, shape))
    return f"{str(dtype).removeprefix('torch.')}[{sizes}]"


def _port(port: Port, program: Program) -> str:
    kind = f", {port.quantized}" if port.quantized else ""
    text = f"{port.name}: {type_text(port.dtype, port.shape)}{kind}"
    if port.scale is None:
        return text
    scale = program.constants[port.scale]
    return f"{text}, scale {f'{float(scale):.7g}' if scale.numel() == 1 else port.scale}"


def _step(step: Step, program: Program) -> str:
    results = ", ".join(f"{v.name}: {type_text(v.dtype, v.shape)}" for v in step.results)
    # The path stands behind it.
    named = {name: value for name, value in step.arguments.items() if name != "name"}
    arguments = ", ".join(f"{name}={_argument(a, program)}" for name, a in named.items())
    name = step.operator.removeprefix("bevquant_hybrid::").replace("::", ".")
    scope = f"  # {step.scope}" if step.scope else ""
    return f"{results} = {name}({arguments}){scope}"


def _argument(argument: Argument, program: Program) -> str:
    if isinstance(argument, Operand):
        if not argument.constant:
            return argument.name
        tensor = program.constants[argument.name]
        if tensor.numel() == 1:
            return f"{tensor.item():.7g}" if tensor.is_floating_point() else str(tensor.item())
        return f"{argument.name} {type_text(tensor.dtype, tuple(tensor.shape))}"
    if isinstance(argument, tuple):
        return f"[{', '.join(_argument(item, program) for item in argument)}]"
    if isinstance(argument, torch.dtype):
        return str(argument).removeprefix("torch.")
    return str(argument)
