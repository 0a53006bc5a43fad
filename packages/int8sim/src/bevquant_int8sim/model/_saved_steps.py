"""Steps in a file: by their fields, in both directions.

A tensor is written by its name in the file, a function by its name, a module by its class and
arguments. The form of a step is that of its first output. Defaults are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, fields
from functools import cache
from typing import Any, get_type_hints

import msgspec
import torch
from torch import Tensor, nn

from bevquant_int8sim.model._coords import Geometry
from bevquant_int8sim.model._form import Form
from bevquant_int8sim.model._integer_steps import Stored
from bevquant_int8sim.model._program import Value
from bevquant_int8sim.model._saved_calls import (
    READABLE,
    from_json,
    function_name,
    module_config,
    named_function,
    rebuilt_module,
    to_json,
)
from bevquant_int8sim.model._step import Step
from bevquant_int8sim.model._weighted_steps import Weighted
from bevquant_quantizers.documents import as_form

_MODULES = (Step.__module__, Stored.__module__, Weighted.__module__)
_READABLE = [(name,) for name in READABLE]


def _kinds(base: type[Step]) -> Iterator[type[Step]]:
    """The kinds of steps that a file may have: those of this package's modules."""
    for kind in base.__subclasses__():
        if kind.__module__ in _MODULES:
            yield kind
            yield from _kinds(kind)


_KINDS = {kind.__name__: kind for kind in _kinds(Step) if hasattr(kind, "op")}


def step_data(step: Step, number: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A step in terms of JSON; its tensors are added to `tensors`."""
    data: dict[str, Any] = {"kind": type(step).__name__}
    found: dict[str, Tensor] = {}
    for one in fields(step):
        value = getattr(step, one.name)
        if one.name == "form" or _is_default(one, value):
            continue
        if isinstance(value, Tensor):
            found[f"{number}.{one.name}"] = value
            data[one.name] = f"{number}.{one.name}"
        elif one.name == "scales":
            scales = {f"{number}.scale{i}": scale for i, scale in enumerate(value)}
            found |= scales
            data[one.name] = list(scales)
        elif one.name == "function":
            data[one.name] = _function_data(step, value)
        elif isinstance(value, nn.Module):
            config = module_config(value)
            if isinstance(config, str):
                raise ValueError(config)
            state = {f"{number}.module.{name}": t for name, t in config[1].items()}
            found |= state
            data[one.name] = to_json({"config": config[0], "tensors": list(state)})
        elif one.name == "outputs":
            data[one.name] = list(value)
        else:
            data[one.name] = to_json(asdict(value) if isinstance(value, Geometry) else value)
    tensors |= found
    return data


def _is_default(one: Field[Any], value: Any) -> bool:
    if one.default is not MISSING:
        same: bool = one.default is value or (type(value) is not Tensor and one.default == value)
        return same
    return one.default_factory is not MISSING and not value


def _function_data(step: Step, function: Callable[..., Any]) -> str:
    name = function_name(function)
    if name is None:
        what = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"{what} is not among the functions that can be saved")
    if name == "getattr" and step.args[1] not in READABLE:
        raise ValueError(f"it reads the attribute {step.args[1]!r}")
    return name


class _ModuleData(msgspec.Struct, forbid_unknown_fields=True):
    config: dict[str, Any]
    tensors: list[str]


_WRITTEN: dict[Any, Any] = {
    Tensor: str,
    Tensor | None: str,
    tuple[Tensor, ...]: list[str],
    Callable[..., Any] | None: str,
    torch._ops.OpOverload: str,
    nn.Module | None: _ModuleData,
}
"""Types that a file has in place of those in memory."""


@cache
def _form_of(name: str) -> type[msgspec.Struct]:
    """Form of a kind of step in a file, which follows from the types of its fields."""
    kind = _KINDS[name]
    hints = get_type_hints(kind, include_extras=True)
    members: list[Any] = [("kind", str)]
    for one in fields(kind):
        if one.name != "form":
            written = _WRITTEN.get(hints[one.name], hints[one.name])
            optional = one.default is not MISSING or one.default_factory is not MISSING
            absent = (written | msgspec.UnsetType, msgspec.UNSET)
            members.append((one.name, *(absent if optional else (written,))))
    return msgspec.defstruct(kind.op, members, forbid_unknown_fields=True, kw_only=True)


class StepReader:
    """Reads steps, and adds the tensors that they name to `used`."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Value],
        used: set[str],
        libraries: Collection[str],
    ) -> None:
        self._tensors, self._values, self._used = tensors, values, used
        self._libraries = libraries

    def read(self, data: Mapping[str, Any]) -> Step:
        """The step of a file's entry."""
        path = str(data.get("path") or "the model")
        kind = _KINDS.get(str(data.get("kind")))
        if kind is None:
            raise ValueError(f"{path}: unknown kind of step {data.get('kind')!r}")
        hints = get_type_hints(kind)
        try:
            fields_given = {name: from_json(value) for name, value in data.items()}
            form = _form_of(kind.__name__)
            written = as_form(fields_given, form, where="its step", what=kind.op)
            given: dict[str, Any] = {}
            for one in fields(kind):
                value = getattr(written, one.name, msgspec.UNSET)
                if value is not msgspec.UNSET:
                    given[one.name] = self._value(value, hints[one.name])
            if issubclass(kind, Stored):
                given["form"] = self._form_of(given["outputs"][0])
            if given.get("function") is getattr and given["args"][1:2] not in _READABLE:
                raise ValueError(f"it reads the attribute {given['args'][1:]!r}")
            step = kind(**given)
            step.check()
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return step

    def _value(self, value: Any, hint: Any) -> Any:
        """A field in memory, of its value in the file."""
        if hint in (Tensor, Tensor | None):
            return self._tensor(value)
        if hint == tuple[Tensor, ...]:
            return tuple(map(self._tensor, value))
        if hint in (Callable[..., Any] | None, torch._ops.OpOverload):
            return named_function(value, self._libraries)
        if hint == nn.Module | None:
            state = {n.partition(".module.")[2]: self._tensor(n) for n in value.tensors}
            return rebuilt_module(value.config, state)
        return value

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ValueError(f"the tensor {name} is missing")
        self._used.add(name)
        return self._tensors[name]

    def _form_of(self, output: str) -> Form:
        if output not in self._values:
            raise ValueError(f"nothing is said about its output {output!r}")
        return self._values[output].form
