"""Traced modules: recovery of classes and settings, and an interpreter of their graphs."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid.operators._attributes import is_leaf, row_of_module

_PACKAGE = __package__.partition(".")[0]

Enter = Callable[[str, nn.Module, Sequence[Any], Callable[[], Any]], Any]
_BUILDERS: dict[str, Callable[[list[Any]], Any]] = {
    "prim::ListConstruct": list,
    "prim::TupleConstruct": tuple,
    "prim::DictConstruct": lambda given: dict(zip(given[::2], given[1::2], strict=True)),
    "prim::ListUnpack": lambda given: tuple(given[0]),
    "prim::TupleUnpack": lambda given: tuple(given[0]),
    "prim::NumToTensor": lambda given: torch.tensor(given[0]),
    "aten::Int": lambda given: int(given[0]),
    "aten::Float": lambda given: float(given[0]),
    "aten::Bool": lambda given: bool(given[0]),
    "aten::ScalarImplicit": lambda given: given[0].item(),
}


def find_module(model: nn.Module, path: str) -> nn.Module | None:
    """The module at a path, traced or not; None where there is none."""
    found: Any = model
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None


def settings_of(module: nn.Module) -> nn.Module:
    """What stands for a traced module: it fills with the settings of its operations."""
    settings = nn.Module()
    for name in ("weight", "bias"):
        value = getattr(module, name, None)
        if isinstance(value, Tensor):
            settings.__dict__[name] = value
    return settings


def learn(settings: nn.Module, arguments: dict[str, Any], *, weights: bool = True) -> None:
    """Take over the arguments of an operation, the first of each name."""
    for name, value in arguments.items():
        if name == "dim" and isinstance(value, list):
            name = "axes"
        if (weights and name in ("weight", "bias")) or isinstance(value, int | float | str | list):
            value = None if value == [] else value
            settings.__dict__.setdefault(name, value)


def row_of_script(module: nn.Module) -> str:
    """The row of a traced module, by its class; ``""`` of one that holds others."""
    cls = _class_of(module)
    if cls is None:
        return ""
    function = getattr(module, "function", None)
    if isinstance(function, nn.Module):  # a table is the function that it tabulates
        return row_of_script(function)
    # Its class alone says which row it has.
    empty = cls.__new__(cls)
    if not is_leaf(empty):
        return ""
    return row_of_module(empty) or f"torch.nn.{cls.__name__}"


def _class_of(module: Any) -> type[nn.Module] | None:
    """The class that a module had when it was traced, if it is torch's or this package's."""
    kind = module._c._type().qualified_name()
    kind = re.sub(r"___torch_mangle_\d+\.", "", kind.removeprefix("__torch__."))
    home, _, name = kind.rpartition(".")
    if not home.startswith(("torch.nn.", "torch.ao.nn.", f"{_PACKAGE}.")):
        return None
    try:
        found = getattr(importlib.import_module(home), name, None)
    except ModuleNotFoundError:  # traced by a version that has the class elsewhere
        return None
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


@dataclass(frozen=True)
class Step:
    """One operation that was executed."""

    space: str  # where it is registered: "aten", "bevquant_hybrid"
    name: str  # its name there
    values: tuple[Any, ...]  # its arguments in order
    arguments: dict[str, Any]  # the same by their names in its schema
    result: Any  # what it returned


@dataclass(frozen=True)
class _Held:
    """A module as a value of the graph, with its path."""

    module: nn.Module
    path: str


class ScriptRunner:
    """Interprets the graphs of a traced model.

    It calls `step` after every operation, and `enter` for every call of a module, whose result is
    what `enter` returns.
    """

    def __init__(
        self, model: torch.jit.ScriptModule, step: Callable[[Step], None], enter: Enter
    ) -> None:
        self._model = model
        self._step = step
        self._enter = enter
        self._owners: dict[int, tuple[Any, str]] = {}

    def owner(self, value: Any) -> str:
        """Path of the module that a tensor was read from, or ``""``."""
        return self._owners.get(id(value), (None, ""))[1]

    def run(self, *inputs: Any) -> Any:
        """Run the model."""
        return self._call(_Held(self._model, ""), "forward", inputs)

    def _call(self, held: _Held, method: str, inputs: Sequence[Any]) -> Any:
        def run() -> Any:
            return self._run_graph(held, method, inputs)

        return self._enter(held.path, held.module, inputs, run)

    def _run_graph(self, held: _Held, method: str, inputs: Sequence[Any]) -> Any:
        module: Any = held.module
        graph = module._c._get_method(method).graph
        names = [value.debugName() for value in graph.inputs()]
        if len(names) != 1 + len(inputs):
            raise RuntimeError(
                f"{held.path or 'the model'} takes {len(names) - 1} inputs, got {len(inputs)}; "
                "pass as many example inputs as it was traced with"
            )
        values: dict[str, Any] = dict(zip(names, (held, *inputs), strict=True))
        for node in graph.nodes():
            _refuse_branches(node, held.path)
        for node in graph.nodes():
            given = [values[value.debugName()] for value in node.inputs()]
            outputs = [value.debugName() for value in node.outputs()]
            result = self._run_node(node, given, held.path)
            if len(outputs) == 1:
                result = (result,)
            values.update(zip(outputs, result or (), strict=True))
        results = tuple(values[value.debugName()] for value in graph.outputs())
        return results[0] if len(results) == 1 else results

    def _run_node(self, node: Any, given: list[Any], path: str) -> Any:
        kind = node.kind()
        if kind == "prim::Constant":
            return node.output().toIValue()
        if kind == "prim::GetAttr":
            return self._attribute(given[0], node.s("name"))
        if kind == "prim::CallMethod":
            return self._call(given[0], node.s("name"), given[1:])
        if kind == "aten::__getitem__" and isinstance(given[0], dict):
            return given[0][given[1]]  # which no operator takes from Python
        if kind in _BUILDERS:
            return _BUILDERS[kind](given)
        return self._operate(node, given, path)

    def _attribute(self, held: _Held, name: str) -> Any:
        value = getattr(held.module, name)
        if isinstance(value, nn.Module):
            return _Held(value, f"{held.path}.{name}" if held.path else name)
        # The value is kept too, so that no other gets its identity.
        self._owners[id(value)] = value, held.path
        return value

    def _operate(self, node: Any, given: list[Any], path: str) -> Any:
        space, _, name = node.kind().partition("::")
        schema = torch._C.parse_schema(node.schema())
        overload = getattr(getattr(torch.ops, space), name)
        overload = getattr(overload, schema.overload_name or "default")
        named = {a.name: v for a, v in zip(schema.arguments, given, strict=True)}
        # A graph has all arguments by place; those that Python takes by name stand last.
        by_name = {a.name: named[a.name] for a in schema.arguments if a.kwarg_only}
        try:
            result = overload(*given[: len(given) - len(by_name)], **by_name)
        except Exception as error:
            raise RuntimeError(
                f"{path or 'the model'} does not run on the example inputs: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._step(Step(space, name, tuple(given), named, result))
        return result


def _refuse_branches(node: Any, path: str) -> None:
    kind = node.kind()
    if next(iter(node.blocks()), None) is not None or kind == "prim::CallFunction":
        raise ValueError(
            f"{path or 'the model'} holds a {kind.removeprefix('prim::')}: it was scripted; make "
            "the model with torch.jit.trace"
        )
