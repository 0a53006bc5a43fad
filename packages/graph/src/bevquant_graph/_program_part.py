"""What a module of an exported program runs: operators and children, in the program's order."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import traceback

__all__ = ["Part", "Plan", "Step", "Value", "freed", "item", "named", "root_class"]


@dataclass(frozen=True)
class Value:
    """A value of a call, by its place: inputs first, then what the steps made."""

    place: int


@dataclass(frozen=True)
class Step:
    """An operator, a child (its path and which of its plans) or, without both, an attribute."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    child: str | None = None
    plan: int = 0
    origin: str = ""
    place: str = field(default="", compare=False)
    dead: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Plan:
    """One call of a module: its steps, and what it returns."""

    steps: tuple[Step, ...]
    result: Any

    def __deepcopy__(self, _: Any) -> Plan:
        return self  # nothing in it changes, and operators are no values


class Part(nn.Module):
    """What one module of an exported program computes, call by call as the program has it."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[Plan] = []

    def forward(self, *values: Any, plan: int = 0) -> Any:
        """Run the steps of one plan."""
        made = list(values)
        for step in self.plans[plan].steps:
            args = _with(step.args, made)
            kwargs = {name: _with(value, made) for name, value in step.kwargs}
            with _noted(step):  # one line for all: whoever watches tells steps by their order
                made.append(self._run(step, args, kwargs))
            for index in step.dead:
                made[index] = None
        return _with(self.plans[plan].result, made)

    def _run(self, step: Step, args: Any, kwargs: Any) -> Any:
        if step.child is None:
            return step.operator(*args, **kwargs)
        if step.operator is getattr:
            owner, _, name = step.child.rpartition(".")
            return getattr(self.get_submodule(owner), name)
        child = self.get_submodule(step.child)
        return child(*args, plan=step.plan) if step.plan else child(*args)


def root_class(info: Any, sizes: dict[int, tuple[str, dict[int, int] | None, Any]]) -> type[Part]:
    """The class of a whole program, by how its inputs and outputs are nested and their sizes."""
    names = list(info.orig_args)

    class Root(Part):
        """The whole of a program: it takes and returns what the exported model does."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """Check the inputs, run the program."""
            given = dict(zip(names, args, strict=False)) | kwargs
            if len(args) > len(names) or set(given) != set(names):
                raise TypeError(
                    f"{type(self).__name__}: expected the inputs {names} that the program was "
                    f"exported with, got {len(args)} positional ones and {sorted(kwargs)}"
                )
            wanted = info.in_spec
            count = wanted.children()[0].num_children
            ordered = [given[name] for name in names]
            keys = names[count:]
            leaves, spec = pytree.tree_flatten(
                (tuple(ordered[:count]), dict(zip(keys, ordered[count:], strict=True)))
            )
            if spec != wanted:
                raise TypeError(
                    f"{type(self).__name__}: expected inputs nested as the program's, {wanted}, "
                    f"got {spec}"
                )
            for index, (name, fixed, number) in sizes.items():
                if fixed is None and leaves[index] != number:
                    raise ValueError(
                        f"{type(self).__name__}: input {name} must be {number!r}, as which the "
                        f"program was exported, got {leaves[index]!r}; export again with it"
                    )
                shape = () if fixed is None else tuple(leaves[index].shape)
                for axis, size in (fixed or {}).items():
                    if axis >= len(shape) or shape[axis] != size:
                        raise ValueError(
                            f"{type(self).__name__}: input {name} must have size {size} in axis "
                            f"{axis}, to which the program was exported, got shape {shape}; "
                            "export again with dynamic_shapes"
                        )
            return pytree.tree_unflatten(super().forward(*leaves), info.out_spec)

    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    Root.forward.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
    return Root


@contextmanager
def _noted(step: Step) -> Iterator[None]:
    """Where a step comes from, in the graphs that are captured of this module."""
    if not torch.compiler.is_compiling():
        yield
        return
    note = {"bevquant_origin": step.origin, "bevquant_place": step.place}
    with traceback.preserve_node_meta(), traceback.annotate(note):
        yield


def named(name: str, base: Any) -> type[Part]:
    """A class of the author's name, which notes and messages show."""
    return type(name, (base,), {"__doc__": base.__doc__})


def item(values: Any, index: int) -> Any:
    return values[index]


def freed(steps: list[Step], inputs: int, result: list[Any]) -> tuple[Step, ...]:
    """Steps that know which values nobody reads any more."""
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        last[inputs + number] = number
        for item in pytree.tree_leaves((step.args, dict(step.kwargs)), is_leaf=_is_value):
            if _is_value(item):
                last[item.place] = number
    for item in result:
        if _is_value(item):
            last.pop(item.place, None)
    dead: dict[int, list[int]] = {}
    for index, number in last.items():
        dead.setdefault(number, []).append(index)
    return tuple(replace(s, dead=tuple(dead.get(i, ()))) for i, s in enumerate(steps))


def _is_value(item: object) -> bool:
    return isinstance(item, Value)


def _with(value: Any, made: list[Any]) -> Any:
    """What stands for the values in an argument."""
    if isinstance(value, Value):
        return made[value.place]
    if isinstance(value, list | tuple):
        found = [_with(item, made) for item in value]
        return found if isinstance(value, list) else tuple(found)
    if isinstance(value, dict):
        return {key: _with(item, made) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_with(v, made) for v in (value.start, value.stop, value.step)))
    return value
