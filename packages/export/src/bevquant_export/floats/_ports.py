"""Inputs and outputs of a module, in the order in which torch's exporter writes them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import arguments, as_example, flatten, leaf_names


def called(module: nn.Module, args: Any) -> list[tuple[str, Tensor]]:
    """Every result of a call and where in the result it lies.

    Raises:
        ValueError: The module returns something else than tensors.
    """
    positional, named = arguments(args)
    with torch.no_grad():
        result = module(*positional, **named)
    found = list(_members(result, ""))
    if not found:
        raise ValueError("export_float_onnx: the module returns no tensor")
    return found


def tensors_in(args: Any) -> list[Tensor]:
    """Tensors among the arguments, in order.

    Raises:
        ValueError: An argument is no tensor.
    """
    positional, named = arguments(args)
    values = [*positional, *named.values()]
    for place, value in enumerate(values):
        if not isinstance(value, Tensor):
            raise ValueError(
                f"export_float_onnx: argument {place} is {type(value).__name__}; expected tensors "
                "alone. Wrap the module in one that holds the rest"
            )
    return values


def by_parameter(module: nn.Module, args: Any) -> dict[str, Tensor]:
    """Parameters of the forward to the tensors that a call gives for them.

    Raises:
        ValueError: An argument is no tensor.
    """
    args = as_example(module, args)
    tensors = tensors_in(args)
    return dict(zip(leaf_names(module, flatten(arguments(args))[1]), tensors, strict=True))


def input_names(module: nn.Module, args: Any, wanted: Sequence[str] | None) -> list[str]:
    """As asked for, or the parameters' names.

    Raises:
        ValueError: Not as many as inputs, or two of one name.
    """
    positional, named = arguments(args)
    known = list(inspect.signature(module.forward).parameters)
    names = [*known[: len(positional)], *named]
    count = len(positional) + len(named)
    return checked("export_float_onnx: input_names", names, count, wanted)


def output_names(places: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """As asked for, or the results' keys and places.

    Raises:
        ValueError: Not as many as outputs, or two of one name.
    """
    names = [f"output_{p}" if p[:1].isdigit() else p or "output" for p in places]
    return checked("export_float_onnx: output_names", names, len(names), wanted)


def checked(argument: str, names: list[str], count: int, wanted: Sequence[str] | None) -> list[str]:
    """Names as wanted, or these; `argument` is what a message begins with.

    Raises:
        ValueError: Not `count` of them, or two of one name.
    """
    chosen = names if wanted is None else list(wanted)
    if len(chosen) != count or len(set(chosen)) != count or not all(chosen):
        raise ValueError(
            f"{argument}={chosen}: expected {count} different names"
            + (f", one for each of {names}" if len(names) == count else "")
        )
    return chosen


def _members(value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _members(item, _below(where, re.sub(r"\W+", "_", str(key))))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _members(item, _below(where, str(place)))
    else:
        raise ValueError(
            f"export_float_onnx: the module returns {type(value).__name__} at "
            f"{where or 'its only place'}; expected tensors alone"
        )


def _below(where: str, key: str) -> str:
    return f"{where}_{key}" if where else key
