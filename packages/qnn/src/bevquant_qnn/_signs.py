"""Tensors that are never negative, by the graph: their ranges have the integers from 0 on."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from bevquant_qnn._flow import Flow, Read
from bevquant_qnn._share import ranges_of
from bevquant_qnn._steps import Steps

# Clamps, with the names of their bounds.
_CLAMPS = {name: ("min", "max") for name in ("clamp", "clamp_min")}
_CLAMPS["hardtanh"] = ("min_val", "max_val")
# Results are at least 0 if the first operand is: kinds, and operators by name.
_KEEPS = frozenset("identity layout_op max_pool avg_pool resize quantize mean sum amax".split())


def choose_unsigned(flow: Flow) -> None:
    """Make quantizers unsigned whose tensors are never negative."""
    groups, members = ranges_of(flow), defaultdict[object, list[Read]](list)
    for read in flow.reads:
        members[groups.find(read.quantizer)].append(read)
    positive = {steps: _never_negative(steps) for steps in {read.steps for read in flow.reads}}
    # Quantizers with one range are unsigned together, or not at all.
    for reads in members.values():
        if all(_takes_unsigned(read) and read.value in positive[read.steps] for read in reads):
            for read in reads:
                read.quantizer.unsigned = True


def _takes_unsigned(read: Read) -> bool:
    quantizer, steps = read.quantizer, read.steps
    return (
        isinstance(quantizer.num_bits, int)
        and quantizer.num_bits <= 8
        and quantizer.amax is None
        # Sparse tensors and sampled maps: engines have int8 kernels for these.
        and steps.spec(read.node).kind != "sample"
        and not steps.is_sparse(read.value)
    )


def _never_negative(steps: Steps) -> set[fx.Node]:
    """Nodes of a captured graph whose values are at least 0."""
    found: set[fx.Node] = set()
    for node in steps.nodes:
        if _is_positive(steps, node, found):
            found.add(node)
    return found


def _is_positive(steps: Steps, node: fx.Node, known: set[fx.Node]) -> bool:
    spec = steps.spec(node)
    if spec.positive:
        return True
    if spec.name in _CLAMPS:
        least, most = _CLAMPS[spec.name]
        given = dict(zip((least, most), node.args[1:], strict=False)) | dict(node.kwargs)
        low, high = given.get(least, -1 if spec.name == "hardtanh" else None), given.get(most)
        if high is not None and not _at_least_0(high):
            return False  # the upper bound is the stronger one
        return _at_least_0(low) or (low is None and _first(node) in known)
    if spec.kind in ("add", "concat") or spec.name == "mul":
        numbers = [n for n in (*node.args, *node.kwargs.values()) if isinstance(n, int | float)]
        axis = spec.kind == "concat"
        return known.issuperset(node.all_input_nodes) and (axis or all(n >= 0 for n in numbers))
    if spec.layout == "pad":
        given = dict(zip(("mode", "value"), node.args[2:], strict=False)) | dict(node.kwargs)
        fills = given.get("mode", "constant") == "constant"
        if fills and not _at_least_0(given.get("value") or 0):
            return False
    keeps = spec.kind in _KEEPS or spec.name in _KEEPS or spec.casts
    return keeps and _first(node) in known


def _at_least_0(bound: object) -> bool:
    return isinstance(bound, int | float) and bound >= 0


def _first(node: fx.Node) -> object:
    return node.args[0] if node.args else None
