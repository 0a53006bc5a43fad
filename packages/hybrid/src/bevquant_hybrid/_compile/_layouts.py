"""Programs that take and return pictures with their channels last."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from bevquant_hybrid.runtime._program import (
    Argument,
    Operand,
    Port,
    Program,
    Step,
    Value,
    used_constants,
)

__all__ = ["with_layouts"]

_TO_NCHW, _TO_NHWC = (0, 3, 1, 2), (0, 2, 3, 1)


def with_layouts(program: Program, input_layout: str, output_layout: str) -> Program:
    """Return a program whose inputs or outputs of four axes are NHWC where that is asked for."""
    if input_layout == "NHWC":
        program = _with_inputs_last(program)
    return _with_outputs_last(program) if output_layout == "NHWC" else program


def _with_inputs_last(program: Program) -> Program:
    ports: list[Port] = []
    before: list[Step] = []
    names: dict[str, str] = {}
    for port in program.inputs:
        if port.shape is None or len(port.shape) != 4:
            ports.append(port)
            continue
        name = port.operand.name
        names[name] = f"%{name}.NCHW"
        before.append(_permute(port.operand, _TO_NCHW, Value(names[name], port.dtype, port.shape)))
        shape = tuple(port.shape[i] for i in _TO_NHWC)
        ports.append(replace(port, shape=shape, axis=_moved(port.axis)))
    steps = [
        replace(step, arguments={n: _renamed(a, names) for n, a in step.arguments.items()})
        for step in program.steps
    ]
    outputs = [
        replace(port, operand=Operand(names.get(port.operand.name, port.operand.name)))
        if not port.operand.constant
        else port
        for port in program.outputs
    ]
    return replace(program, inputs=tuple(ports), steps=(*before, *steps), outputs=tuple(outputs))


def _with_outputs_last(program: Program) -> Program:
    ports: list[Port] = []
    behind: list[Step] = []
    constants: dict[str, Tensor] = dict(program.constants)
    for port in program.outputs:
        if port.shape is None or len(port.shape) != 4:
            ports.append(port)
            continue
        shape = tuple(port.shape[i] for i in _TO_NHWC)
        value = Value(f"%{port.name}.NHWC", port.dtype, shape)
        behind.append(_permute(port.operand, _TO_NHWC, value))
        scale = port.scale
        if scale is not None and constants[scale].dim() == 4:  # one for each element
            constants[f"{port.name}.NHWC.scale"] = constants[scale].permute(_TO_NHWC).contiguous()
            scale = f"{port.name}.NHWC.scale"
        ports.append(
            replace(
                port, operand=Operand(value.name), shape=shape, scale=scale, axis=_moved(port.axis)
            )
        )
    made = replace(program, outputs=tuple(ports), steps=(*program.steps, *behind))
    return replace(made, constants=used_constants(made, constants))


def _permute(source: Operand, order: tuple[int, ...], result: Value) -> Step:
    return Step("aten::permute", {"self": source, "dims": order}, (result,))


def _moved(axis: int) -> int:
    """Where an axis of NCHW stands in NHWC."""
    return _TO_NHWC.index(axis) if axis >= 0 else axis


def _renamed(argument: Argument, names: dict[str, str]) -> Argument:
    if isinstance(argument, Operand) and not argument.constant:
        return Operand(names.get(argument.name, argument.name))
    if isinstance(argument, tuple):
        return tuple(_renamed(item, names) for item in argument)
    return argument
