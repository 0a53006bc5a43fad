"""A converted model as a program."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid._compile._record import Recorder, RefusedError
from bevquant_hybrid._compile._scopes import following, in_graph
from bevquant_hybrid.qtensor import QTensor, payload
from bevquant_hybrid.runtime import _structure as structure
from bevquant_hybrid.runtime._compiled_model import CompiledModel
from bevquant_hybrid.runtime._operators import is_integer
from bevquant_hybrid.runtime._program import Operand, Port, Program, Step, operands, used_constants

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
            for name, tensor in zip(_input_names(module, arguments), taken, strict=True)
        ]
        try:
            with recorder:
                output = module(*structure.build(arguments, taken))
                returned, result = structure.flatten(output, f"{caller}: the model's output")
                values = [payload(tensor) for tensor in returned]
        except Exception as error:
            raise _explained(error, recorder, module, caller) from error
    outputs = [
        _output(recorder, place, tensor, value, caller)
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
        inputs=tuple(_with_input_scale(port, steps) for port in ports),
        outputs=tuple(_with_output_scale(port, steps) for port in outputs),
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


def _input_names(module: nn.Module, arguments: Any) -> list[str]:
    """Name inputs as the forward's arguments are named, and what is nested by its place there."""
    if isinstance(module, torch.jit.ScriptModule):
        graph = [value.debugName().partition(".")[0] for value in module.inlined_graph.inputs()]
        known = graph[1:]
    else:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(module.forward).parameters.values()
        known = [parameter.name for parameter in parameters if parameter.kind in kinds]
    names: list[str] = []
    for place in structure.places(arguments, "input"):
        first, dot, rest = place.partition(".")
        base = known[int(first)] if int(first) < len(known) else f"input{first}"
        name = f"{base}{dot}{rest}"
        while name in names:
            name += "_"
        names.append(name)
    return names


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


def _output(recorder: Recorder, place: str, given: Tensor, value: Tensor, caller: str) -> Port:
    shape = None if recorder.is_loose(value) else tuple(value.shape)
    port = Port(place, recorder.operand(value, place), value.dtype, shape)
    if not isinstance(given, QTensor):
        return port
    scale = recorder.operand(given.scale, f"{place}.scale")
    if not scale.constant:
        raise ValueError(
            f"{caller}: the scale of the output {place} depends on the data; put a DeQuantStub "
            "behind it"
        )
    return replace(
        port,
        scale=scale.name,
        axis=given.q_per_channel_axis(),
        quantized=str(given.dtype),
        rounding=given.rounding,
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


def _with_input_scale(port: Port, steps: Sequence[Step]) -> Port:
    scales = {
        (step.arguments["scale"], step.arguments["axis"])
        for step in steps
        if step.operator == "bevquant_hybrid::quantize" and step.arguments["x"] == port.operand
    }
    if len(scales) != 1:
        return port
    ((scale, axis),) = scales
    return _with_scale(port, scale, axis)


def _with_output_scale(port: Port, steps: Sequence[Step]) -> Port:
    for step in steps:
        made = [Operand(value.name) for value in step.results]
        if step.operator == "bevquant_hybrid::dequantize" and port.operand in made:
            return _with_scale(port, step.arguments["scale"], step.arguments["axis"])
    return port


def _with_scale(port: Port, scale: Any, axis: Any) -> Port:
    return replace(port, scale=scale.name, axis=axis) if scale.constant else port


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
