"""A converted model as a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid._compile._ports import (
    input_names,
    output_port,
    with_input_scale,
    with_output_scale,
)
from bevquant_hybrid._compile._record import Recorder, RefusedError
from bevquant_hybrid._compile._scopes import following, in_graph
from bevquant_hybrid.qtensor import payload
from bevquant_hybrid.runtime import _structure as structure
from bevquant_hybrid.runtime._compiled_model import CompiledModel
from bevquant_hybrid.runtime._operators import is_integer
from bevquant_hybrid.runtime._program import Port, Program, Step, operands, used_constants

__all__ = ["program_of"]


def program_of(
    module: nn.Module,
    inputs: tuple[Any, ...],
    caller: str,
    name: str,
    march: str,
    options: Mapping[str, Any],
) -> Program:
    """Run a model once and return what it computed as a program.

    The program is then run too, and must return the same; on other values as well, so that
    whatever escaped the record is found.

    Args:
        module: Converted, or a traced form of one.
        inputs: Arguments of its forward.
        caller: Function that messages name.
        name: Name of the program.
        march: March of the program.
        options: What the program notes of its compilation.

    Raises:
        ValueError: The model calls an operator that is none of an integer program, which the
            message names with its module, or no integer operator at all.
        TypeError: Its inputs or outputs hold something else than tensors and numbers.
        RuntimeError: The program returns something else, as for a model that changes when called.
    """
    given, arguments = structure.flatten(inputs, f"{caller}: example_inputs")
    # Each its own: one tensor may have been given twice.
    taken = [tensor.detach().clone() for tensor in given]
    with torch.no_grad(), following(module) as scope:
        recorder = Recorder(module, scope)
        ports = [
            Port(name, recorder.input(tensor, name), tensor.dtype, tuple(tensor.shape))
            for name, tensor in zip(input_names(module, arguments), taken, strict=True)
        ]
        try:
            # A traced graph as it stands: optimizing it would compute too.
            with torch.jit.optimized_execution(False), recorder:  # type: ignore[attr-defined]
                output = module(*structure.build(arguments, taken))
                returned, result = structure.flatten(output, f"{caller}: the model's output")
                values = [payload(tensor) for tensor in returned]
        except Exception as error:
            explained = _explained(error, recorder, module, caller)
            if explained is error:
                raise
            raise explained from error
    outputs = [
        output_port(recorder, place, tensor, value, caller)
        for place, tensor, value in zip(
            structure.places(result, "output"), returned, values, strict=True
        )
    ]
    if not any(is_integer(step.operator) for step in recorder.steps):
        raise ValueError(
            f"{caller}: module computes nothing in integers; prepare it, train or calibrate it, "
            "and give what convert or convert_fx returns"
        )
    steps = _needed(recorder.steps, outputs)
    program = Program(
        name=name,
        march=march,
        inputs=tuple(with_input_scale(port, steps) for port in ports),
        outputs=tuple(with_output_scale(port, steps) for port in outputs),
        arguments=arguments,
        result=result,
        steps=steps,
        constants={},
        options=options,
    )
    program = replace(program, constants=used_constants(program, recorder.constants))
    _check_equal(program, taken, values, caller)
    others = [_other_values(tensor) for tensor in taken]
    try:
        with torch.no_grad():
            output = module(*structure.build(arguments, [tensor.clone() for tensor in others]))
    except (ValueError, RuntimeError):
        return program  # nobody said that it takes these: a sum may leave int32
    returned, _ = structure.flatten(output, f"{caller}: the model's output")
    _check_equal(program, others, [payload(tensor) for tensor in returned], caller)
    return program


def _other_values(tensor: Tensor) -> Tensor:
    """The same tensor with some elements zero: what a model computes must follow."""
    keep = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    return tensor * keep.to(tensor.device)


def _explained(error: Exception, recorder: Recorder, module: Any, caller: str) -> Exception:
    refused = recorder.refused
    if not isinstance(refused, RefusedError):
        return refused or error
    where, reason = recorder.refused_in, str(refused)
    if isinstance(module, torch.jit.ScriptModule):
        called, where = in_graph(module, refused.operator, recorder.calls)
        reason = reason.replace(refused.operator, called, 1)
    before = next((step.scope for step in reversed(recorder.steps) if step.scope), "")
    if where:
        place = f"module {where}"
    else:
        place = f"the forward, behind {before}" if before else "the forward"
    return ValueError(
        f"{caller}: {place}: {reason}. A program holds what a BPU computes in a converted model: "
        "give the operator its quantized form (FloatFunctional, a module of bevquant_hybrid.nn), "
        "or leave it to the code around the model; a hybrid model is exported by export_to_onnx "
        "for hb_mapper instead"
    )


def _needed(steps: Sequence[Step], outputs: Sequence[Port]) -> tuple[Step, ...]:
    """The steps that outputs depend on."""
    wanted = {port.operand.name for port in outputs if not port.operand.constant}
    kept: list[Step] = []
    for step in reversed(steps):
        if any(value.name in wanted for value in step.results):
            kept.append(step)
            for argument in step.arguments.values():
                wanted |= {o.name for o in operands(argument) if not o.constant}
    return tuple(reversed(kept))


def _check_equal(
    program: Program, inputs: Sequence[Tensor], expected: Sequence[Tensor], caller: str
) -> None:
    again = CompiledModel(program)(*structure.build(program.arguments, inputs))
    results, _ = structure.flatten(again, program.name)
    for port, tensor, value in zip(program.outputs, results, expected, strict=True):
        mine, models = payload(tensor), payload(value)
        if mine.dtype != models.dtype or not torch.equal(mine, models):
            raise RuntimeError(
                f"{caller}: the output {port.name} of the program is not what the model returned "
                f"on {models.device}: its forward depends on values in ways that no operator "
                "shows (lists, numpy), or on what was called before; or move it to the CPU, where "
                "floats are computed bit by bit as in the program"
            )
