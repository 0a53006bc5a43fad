"""Whether two tensors of a trace have the same values in every frame: ``torch.equal(key, value)``.

Copies of torch 1's attention ask this, and callers give them two sums ``memory + position``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx


def node_of(value: Tensor) -> fx.Node | None:
    """The node of the trace that computes a tensor; None outside of a trace."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot  # and sympy

    mode = get_proxy_mode()
    held: Any = None if mode is None else get_proxy_slot(value, mode.tracer, None)
    node = getattr(getattr(held, "proxy", None), "node", None)
    return node if isinstance(node, fx.Node) else None


def equal_constants(
    one: fx.Node, two: fx.Node, constant: Callable[[fx.Node], Tensor | None]
) -> Collection[fx.Node] | None:
    """The constants on which the equality of two values depends; None where it is not known.

    Equal are results of the same operators on equal operands. Two constants are equal by their
    values, as the ranges of two quantizers that had the same data.

    Args:
        one: A node of an unfinished trace.
        two: Another one of it.
        constant: Value of a node for a parameter or a buffer; None for other nodes.
    """
    pairs, met = [(one, two)], set[tuple[fx.Node, fx.Node]]()
    constants: set[fx.Node] = set()
    computed: set[fx.Node] = set()
    while pairs:
        pair = a, b = pairs.pop()
        if a is b or pair in met:
            continue
        met.add(pair)
        value, other = constant(a), constant(b)
        if value is not None and other is not None:
            if not _same(value, other):
                return None
            constants |= {a, b}
        elif _is_pure(a) and a.op == b.op and a.target == b.target:
            left, right = _leaves(a), _leaves(b)
            if len(left) != len(right):
                return None
            for x, y in zip(left, right, strict=True):
                if isinstance(x, fx.Node) and isinstance(y, fx.Node):
                    pairs.append((x, y))
                elif type(x) is not type(y) or x != y:
                    return None
            computed |= {a, b}
        else:
            return None
    # A write since the first of these operations may lie between an operand's two uses.
    nodes = list(one.graph.nodes)
    first = min(map(nodes.index, computed), default=len(nodes))
    return None if any(map(_writes, nodes[first:])) else constants


def _same(one: Tensor, two: Tensor) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)


def _is_pure(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _leaves(node: fx.Node) -> list[Any]:
    """Operands in order, with the names of keywords and the lengths of lists."""
    found: list[Any] = []

    def note(value: Any) -> None:
        if isinstance(value, list | tuple):
            found.append(len(value))
            for member in value:
                note(member)
        elif isinstance(value, dict):
            for name, member in sorted(value.items()):
                found.append(name)
                note(member)
        else:
            found.append(value)

    note(node.args)
    note(node.kwargs)
    return found
