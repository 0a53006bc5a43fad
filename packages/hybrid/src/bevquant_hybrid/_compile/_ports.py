"""Inputs and outputs of a program: their names, shapes and scales."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid._compile._record import Recorder
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.runtime import _structure as structure
from bevquant_hybrid.runtime._program import Operand, Port, Step

__all__ = ["input_names", "output_port", "with_input_scale", "with_output_scale"]


def input_names(module: nn.Module, arguments: Any) -> list[str]:
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


def output_port(recorder: Recorder, place: str, given: Tensor, value: Tensor, caller: str) -> Port:
    """Describe a tensor that the model returned, `value` its plain form."""
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


def with_input_scale(port: Port, steps: Sequence[Step]) -> Port:
    """Note the scale that quantizes an input, where it is one."""
    scales = {
        (step.arguments["scale"], step.arguments["axis"])
        for step in steps
        if step.operator == "bevquant_hybrid::quantize" and step.arguments["x"] == port.operand
    }
    if len(scales) != 1:
        return port
    ((scale, axis),) = scales
    return _with_scale(port, scale, axis)


def with_output_scale(port: Port, steps: Sequence[Step]) -> Port:
    """Note the scale of the integers that an output was, where it was dequantized."""
    for step in steps:
        made = [Operand(value.name) for value in step.results]
        if step.operator == "bevquant_hybrid::dequantize" and port.operand in made:
            return _with_scale(port, step.arguments["scale"], step.arguments["axis"])
    return port


def _with_scale(port: Port, scale: Any, axis: Any) -> Port:
    return replace(port, scale=scale.name, axis=axis) if scale.constant else port
