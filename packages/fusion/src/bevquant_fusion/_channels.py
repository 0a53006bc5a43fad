"""The channel of every value, followed through operators that keep channels apart.

Values are numbered by their channel, from 1, and an operator runs on the numbers themselves; 0
marks values of no channel (padding, another tensor). Numbers are moved as values are. An average L
over positions has L(s·x + t) = s·L(x) + t if its weights add up to 1, so a batch norm may stand on
either side of it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from bevquant_graph import OpSpec, op_spec


def is_float(node: fx.Node) -> bool:
    """Whether a step makes one tensor of floats."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def source(node: fx.Node) -> fx.Node:
    """The operator that makes a value, for a step that only selects one of its results."""
    made: Any = node.args[0] if node.target is operator.getitem else node
    return made if isinstance(made, fx.Node) else node


def keeps_channels(node: fx.Node) -> bool:
    """Whether a step only moves or averages values, by its operator."""
    made = source(node)
    inputs = [i for i in made.all_input_nodes if isinstance(i.meta.get("val"), Tensor)]
    if made.op != "call_function" or not inputs or not all(map(is_float, inputs)):
        return False
    spec = op_spec(made.target)
    if spec.name in ("to", "_to_copy"):
        same: bool = node.meta["val"].dtype == inputs[0].meta["val"].dtype
        return same
    if "dropout" in spec.name:
        # Without training it is an identity.
        return made.args[2] is False
    return spec.kind in ("identity", "layout_op", "concat") or _averages(spec)


def numbered(node: fx.Node, axis: int) -> Tensor:
    """A tensor of the step's shape that holds the number of each value's channel."""
    shape = _shape(node)
    # From 1, as 0 marks values of no channel.
    numbers = torch.arange(1, shape[axis] + 1, dtype=torch.int32)
    numbers = numbers.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return numbers.expand(*shape)


def numbers_behind(node: fx.Node, numbers: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """The numbers of a step's result; None where it mixes channels, or cannot be run on numbers."""
    made = source(node)
    spec = op_spec(made.target)
    inputs = [i for i in made.all_input_nodes if is_float(i)]
    if spec.kind == "identity" or spec.name in ("to", "_to_copy"):
        return numbers.get(inputs[0])
    if any(known_size(size) is None for i in inputs for size in i.meta["val"].shape):
        return None
    none = {i: torch.zeros(_shape(i), dtype=torch.int32) for i in inputs if i not in numbers}
    given = {i: none[i] if i in none else numbers[i] for i in inputs}
    index: Any = None if made is node else node.args[1]
    try:
        if not _averages(spec):
            return _run(made, given, index)
        # Numbers n of one channel average to n and their squares to n²; of several channels they do
        # not.
        first = _run(made, {i: n.double() for i, n in given.items()}, index)
        second = _run(made, {i: n.double() ** 2 for i, n in given.items()}, index)
    except Exception:  # whatever an operator says to integers or a size it has no hint of
        return None
    whole = first.round()
    alike = torch.allclose(first, whole, 0, 1e-6) and torch.allclose(second, whole**2, 1e-9, 1e-9)
    return whole.int() if alike else None


def channels_along(numbers: Tensor, axis: int) -> tuple[int, ...] | None:
    """The number of each place of an axis; None where values along the others have another."""
    rows = distinct(numbers, axis).movedim(axis, 0).flatten(1)
    if not rows.numel() or not torch.equal(rows, rows[:, :1].expand_as(rows)):
        return None
    return tuple(rows[:, 0].tolist())


def channels_into(numbers: Tensor, axis: int) -> dict[int, int] | None:
    """The place on an axis where values of each number are; None where they are at several."""
    rows = distinct(numbers, axis).movedim(axis, 0).flatten(1)
    places = torch.arange(len(rows)).reshape(-1, 1).expand_as(rows)
    pairs = torch.stack((rows.flatten(), places.flatten()), 1).unique(dim=0).tolist()
    found = dict(pairs)
    return found if len(found) == len(pairs) else None


def distinct(numbers: Tensor, kept: int | None = None) -> Tensor:
    """The numbers without those that are one place of memory, but all along the axis ``kept``."""
    for axis, stride in enumerate(numbers.stride()):
        # An expanded axis repeats the same memory.
        if stride == 0 and axis != kept and numbers.shape[axis]:
            numbers = numbers.narrow(axis, 0, 1)
    return numbers


def _averages(spec: OpSpec) -> bool:
    return spec.kind in ("avg_pool", "resize") or spec.name == "mean" or "upsample" in spec.name


def _run(node: Any, values: Mapping[fx.Node, Tensor], index: Any) -> Tensor:
    def value(argument: fx.Node) -> Any:
        return values[argument] if argument in values else known_size(argument.meta["val"])

    args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
    made = node.target(*args, **kwargs)
    return torch.as_tensor(made if index is None else made[index])


def _shape(node: fx.Node) -> list[int]:
    """A step's shape in the example, 1 for sizes that depend on data."""
    return [known_size(size) or 1 for size in node.meta["val"].shape]


def known_size(value: Any) -> Any:
    """A size, or its value in the example; None if it depends on data."""
    return value.node.hint if isinstance(value, torch.SymInt) else value
