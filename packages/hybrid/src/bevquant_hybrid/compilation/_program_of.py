"""A converted model as a program: steps, inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import state_kept
from bevquant_hybrid.compilation._arguments import converted_model, march_of
from bevquant_hybrid.compilation._record import Recorder, RefusedError, following, in_graph
from bevquant_hybrid.qtensor import QTensor, payload
from bevquant_hybrid.runtime._operators import is_integer
from bevquant_hybrid.runtime._program import (
    CompiledModel,
    Nested,
    Port,
    Program,
    flatten,
    operator_step,
    used_constants,
)
from bevquant_int8sim.program import OperatorCall, Ref, TensorType, Value, replaced

_TO_NCHW, _TO_NHWC = (0, 3, 1, 2), (0, 2, 3, 1)


def program_of(
    module: nn.Module,
    inputs: tuple[Any, ...],
    caller: str,
    name: str,
    march: str,
    options: Mapping[str, Any],
    kept: dict[str, Tensor] | None = None,
) -> Program:
    """Run a model once and return its computation as a program.

    The program is then run on the same and on other inputs, and must return the model's results.
    This finds computations that the record missed, and a state that a run leaves: the caller
    restores it (`state_kept`). `kept` gets the model's inputs and its operators' results, by the
    program's names.
    """
    given = flatten(inputs, f"{caller}: example_inputs")
    # Each its own: one tensor may have been given twice.
    taken = [tensor.detach().clone() for tensor in given.tensors]
    with torch.no_grad(), following(module) as scope:
        recorder = Recorder(module, scope, kept)
        ports = [
            Port(name, recorder.input(tensor, name), tensor.dtype, tuple(tensor.shape))
            for name, tensor in zip(_input_names(module, given), taken, strict=True)
        ]
        try:
            # A traced graph as it stands: optimizing it would compute too.
            with torch.jit.optimized_execution(False), recorder:  # type: ignore[attr-defined]
                output = module(*given.build(taken))
                returned = flatten(output, f"{caller}: the model's output")
                values = [payload(tensor) for tensor in returned.tensors]
        except Exception as error:
            explained = _explained(error, recorder, module, caller)
            if explained is error:
                raise
            raise explained from error
    outputs = [
        _output_port(recorder, place, tensor, value, caller)
        for place, tensor, value in zip(returned.places, returned.tensors, values, strict=True)
    ]
    if not any(is_integer(step.operator) for step in recorder.steps):
        raise ValueError(
            f"{caller}: module computes nothing in integers; prepare it, train or calibrate it, "
            "and give what convert or convert_fx returns"
        )
    steps = _needed(recorder.steps, outputs)
    made = {value for step in steps for value in step.outputs}
    constants = recorder.constants
    program = Program(
        name=name,
        march=march,
        inputs=tuple(_with_input_scale(port, steps, constants) for port in ports),
        outputs=tuple(_with_output_scale(port, steps, constants) for port in outputs),
        signature=(given.build([port.operand for port in ports]), {}),
        sparse_inputs={},
        steps=steps,
        values={value: known for value, known in recorder.values.items() if value in made},
        result=returned.build([port.operand for port in outputs]),
        options=options,
    )
    program = replace(program, constants=used_constants(program, constants))
    _check_equal(program, inputs, values, caller)
    # A second run, on other values, shows what the forward decided by the first ones.
    others = [_other_values(tensor) for tensor in given.tensors]
    try:
        with torch.no_grad():
            output = module(*given.build([tensor.clone() for tensor in others]))
    except (ValueError, RuntimeError):
        return program  # other values may overflow int32
    again = flatten(output, f"{caller}: the model's output").tensors
    _check_equal(program, given.build(others), [payload(tensor) for tensor in again], caller)
    return program


def _other_values(tensor: Tensor) -> Tensor:
    """The same tensor with some elements zero, for a second comparison."""
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
    before = next((step.path for step in reversed(recorder.steps) if step.path), "")
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


def _needed(steps: Sequence[OperatorCall], outputs: Sequence[Port]) -> tuple[OperatorCall, ...]:
    """The steps that outputs depend on."""
    wanted = {port.operand.name for port in outputs}
    kept: list[OperatorCall] = []
    for step in reversed(steps):
        if wanted.intersection(step.outputs):
            kept.append(step)
            wanted.update(step.inputs)
    return tuple(reversed(kept))


def _check_equal(
    program: Program, inputs: tuple[Any, ...], expected: Sequence[Tensor], caller: str
) -> None:
    results = flatten(CompiledModel(program)(*inputs), program.name).tensors
    for port, tensor, value in zip(program.outputs, results, expected, strict=True):
        mine, models = payload(tensor), payload(value)
        if mine.dtype != models.dtype or not torch.equal(mine, models):
            raise RuntimeError(
                f"{caller}: the output {port.name} of the program is not what the model returned "
                f"on {models.device}: its forward depends on values in ways that no operator "
                "shows (lists, numpy), or on what was called before; or move it to the CPU, where "
                "floats are computed bit by bit as in the program"
            )


def _input_names(module: nn.Module, arguments: Nested) -> list[str]:
    """Name inputs by the forward's arguments, and nested ones by their places."""
    if isinstance(module, torch.jit.ScriptModule):
        graph = [value.debugName().partition(".")[0] for value in module.inlined_graph.inputs()]
        known = graph[1:]
    else:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(module.forward).parameters.values()
        known = [parameter.name for parameter in parameters if parameter.kind in kinds]
    names: list[str] = []
    for place in arguments.places:
        first, dot, rest = place.partition(".")
        base = known[int(first)] if int(first) < len(known) else f"input{first}"
        name = f"{base}{dot}{rest}"
        while name in names:
            name += "_"
        names.append(name)
    return names


def _output_port(recorder: Recorder, place: str, given: Tensor, value: Tensor, caller: str) -> Port:
    """Describe a tensor that the model returned, `value` its plain form."""
    shape = None if recorder.is_loose(value) else tuple(value.shape)
    port = Port(place, recorder.operand(value, place), value.dtype, shape)
    if not isinstance(given, QTensor):
        return port
    scale = recorder.operand(given.scale, f"{place}.scale")
    if scale.name not in recorder.constants:
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


def _with_input_scale(
    port: Port, steps: Sequence[OperatorCall], constants: Mapping[str, Tensor]
) -> Port:
    """Note the scale that quantizes an input, where it is one."""
    scales = {
        (step.kwargs["scale"].name, step.constants["axis"])
        for step in steps
        if step.operator == "bevquant_hybrid::quantize" and step.kwargs["x"] == port.operand
    }
    # An input that is quantized by several scales has none of its own.
    return _with_scale(port, *scales.pop(), constants) if len(scales) == 1 else port


def _with_output_scale(
    port: Port, steps: Sequence[OperatorCall], constants: Mapping[str, Tensor]
) -> Port:
    """Note the scale of the integers that an output was, where it was dequantized."""
    for step in steps:
        if step.operator == "bevquant_hybrid::dequantize" and port.operand.name in step.outputs:
            scale, axis = step.kwargs["scale"].name, step.constants["axis"]
            return _with_scale(port, scale, axis, constants)
    return port


def _with_scale(port: Port, scale: str, axis: int, constants: Mapping[str, Tensor]) -> Port:
    return replace(port, scale=scale, axis=axis) if scale in constants else port


def record_results(
    model: Any, arguments: tuple[Any, ...], caller: str, march: str | None
) -> tuple[Program, dict[str, Tensor]]:
    """The program of a converted model, and the results of the model's operators.

    The results have the names that the program's steps give them, inputs included.
    """
    module = converted_model(model, caller)
    kept: dict[str, Tensor] = {}
    chosen = march_of(march, caller)
    with state_kept(module):
        return program_of(module, arguments, caller, caller, chosen, {}, kept), kept


def with_layouts(program: Program, input_layout: str, output_layout: str) -> Program:
    """Return a program with NHWC four-axis inputs or outputs, if requested."""
    inputs, outputs = list(program.inputs), list(program.outputs)
    values, constants = dict(program.values), dict(program.constants)
    first: list[OperatorCall] = []
    last: list[OperatorCall] = []
    turned: dict[str, Ref] = {}
    for place, port in enumerate(inputs if input_layout == "NHWC" else ()):
        if port.shape is not None and len(port.shape) == 4:
            name = f"%{port.operand.name}.NCHW"
            turned[port.operand.name] = Ref(name)
            values[name] = Value(TensorType(port.dtype, port.shape), name)
            first.append(_permute(port.operand, _TO_NCHW, name))
            inputs[place] = _channels_last(port)

    def read(ref: Ref) -> Ref:
        return turned.get(ref.name, ref)

    steps = [replace(step, kwargs=replaced(step.kwargs, read)) for step in program.steps]
    for place, given in enumerate(outputs):
        port = outputs[place] = replace(given, operand=read(given.operand))
        if output_layout == "NHWC" and port.shape is not None and len(port.shape) == 4:
            name = f"%{port.name}.NHWC"
            last.append(_permute(port.operand, _TO_NHWC, name))
            if port.scale is not None and constants[port.scale].dim() == 4:  # one for each element
                scale = f"{port.name}.NHWC.scale"
                constants[scale] = constants[port.scale].permute(_TO_NHWC).contiguous()
                port = replace(port, scale=scale)
            outputs[place] = port = replace(_channels_last(port), operand=Ref(name))
            values[name] = Value(TensorType(port.dtype, port.shape), name)
    made = replace(
        program,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        result=flatten(program.result, program.name).build([port.operand for port in outputs]),
        steps=(*first, *steps, *last),
        values=values,
    )
    return replace(made, constants=used_constants(made, constants))


def _permute(source: Ref, order: tuple[int, ...], result: str) -> OperatorCall:
    return operator_step("aten::permute", {"self": source, "dims": order}, (result,))


def _channels_last(port: Port) -> Port:
    """A port of four axes in the order of NHWC."""
    assert port.shape is not None
    axis = _TO_NHWC.index(port.axis) if port.axis >= 0 else port.axis
    return replace(port, shape=tuple(port.shape[i] for i in _TO_NHWC), axis=axis)
