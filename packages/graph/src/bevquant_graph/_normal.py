"""One form per operator: aliases in a trace become the operators of the table.

An alias takes its operator's overload (`multiply` → `mul`, `view` → `reshape`). Axes in another
order are a `permute`, tensors side by side a `cat`, repetitions a `repeat`, zeros around a `pad`.
Each alias calls that operator in torch, so the bits are the same; the replay verifies it. A node
keeps its name, its value and the name of the operator that the forward called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ._operators import ALIASES, OpSpec, op_spec

_aten = torch.ops.aten
CALLED = "bevquant_called"
"""Name of the operator that the forward called, where a node has another form."""
_Form = tuple[OpOverload, tuple[Any, ...]]


def normalise(graph: fx.Graph) -> None:
    """Give each operator of a trace its one form."""
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace != "aten":
            continue
        if target._schema.is_mutable:  # until the write has become an operation of its own
            continue
        form = None if node.kwargs else _form(op_spec(target))
        made = (_operator(target), node.args) if form is None else form(node)
        if made is not None and made[0] is not target:
            node.meta.setdefault(CALLED, _name(target))
            node.target, node.args = made


def called_name(node: fx.Node) -> str:
    """Name of the operator that the forward called; the node may have another form.

    Example:
        >>> from bevquant_graph import capture
        >>> net = torch.nn.Flatten(0)
        >>> [called_name(node) for node in capture(net, torch.ones(2, 2)).operations]
        ['flatten']
    """
    return str(node.meta.get(CALLED) or op_spec(node.target).name)


def _name(target: OpOverload) -> str:
    return str(target._schema.name).removeprefix("aten::")


@cache
def _operator(target: OpOverload) -> OpOverload:
    """The operator that an overload is an alias of, or the overload itself."""
    given = target._schema.arguments
    packet = getattr(_aten, ALIASES.get(_name(target), ""), None)
    for overload in () if packet is None else packet.overloads():
        found: OpOverload = getattr(packet, overload)
        taken, rest = found._schema.arguments[: len(given)], found._schema.arguments[len(given) :]
        same = [(str(a.type), a.kwarg_only) for a in taken] == [
            (str(a.type), a.kwarg_only) for a in given
        ]
        if same and all(argument.has_default_value() for argument in rest):
            return found
    return target


def _form(spec: OpSpec) -> Callable[[fx.Node], _Form | None] | None:
    return _FORMS.get(spec.name) or (_permuted if spec.layout == "permute" else None)


def _permuted(node: fx.Node) -> _Form | None:
    if node.target is _aten.permute.default:
        return None
    # Strides of a tensor with two elements along every axis tell the axes apart.
    rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    probe = torch.empty([2] * rank, device="meta")
    made = node.target(probe, *node.args[1:])  # type: ignore[operator]
    return _aten.permute.default, (
        node.args[0],
        [rank - 1 - int(math.log2(stride)) for stride in made.stride()],
    )


def _reversed(node: fx.Node) -> _Form:
    rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    return _aten.permute.default, (node.args[0], list(range(rank))[::-1])


def _joined(axis: int, rank: int) -> Callable[[fx.Node], _Form | None]:
    def form(node: fx.Node) -> _Form | None:
        operands: Any = node.args[0]
        ranks = [operand.meta["val"].dim() for operand in operands]
        if min(ranks) < rank:  # torch adds axes
            return None
        return _aten.cat.default, (operands, min(axis, ranks[0] - 1))

    return form


def _repeated(node: fx.Node) -> _Form:
    x, times = node.args
    missing = x.meta["val"].dim() - len(times)  # type: ignore[union-attr, arg-type]
    return _aten.repeat.default, (x, [*[1] * missing, *times])  # type: ignore[misc]


def _padded(node: fx.Node) -> _Form:
    x, widths, *value = node.args
    return _aten.pad.default, (x, widths, "constant", *value)


_FORMS: dict[str, Callable[[fx.Node], _Form | None]] = {
    "numpy_T": _reversed,
    "hstack": _joined(1, 1),
    "vstack": _joined(0, 2),
    "dstack": _joined(2, 3),
    "column_stack": _joined(1, 2),
    "tile": _repeated,
    "constant_pad_nd": _padded,
    "reshape": lambda node: (_aten.reshape.default, node.args[:2]),  # without strides
}
