"""The partition of one unit, under the names of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from bevfusion_quant.bpu._labels import node_labels
from bevquant_hybrid.partition import partition, place_operator

if TYPE_CHECKING:
    from torch import fx

    from bevquant_hybrid.partition import Plan, PlanNode

__all__ = ["unit_plan"]


def unit_plan(
    unit: str,
    graph: fx.GraphModule,
    march: str,
    shapes: Sequence[tuple[int, ...]],
    on_cpu: Sequence[str],
) -> Plan:
    """Where each node of a prepared unit runs, under the names of its layers, and why.

    Args:
        unit: "camera" or "bev".
        graph: From `prepare_qat_fx`.
        march: The BPU.
        shapes: Of the unit's inputs; of several images one is run.
        on_cpu: Paths of modules within the unit that the user put on the CPU.
    """
    examples = tuple(torch.zeros(1, *shape[1:]) for shape in shapes)
    found = partition(graph, march, example_inputs=examples)
    labels = node_labels(unit, graph)
    names = {node: label.short for node, label in labels.items()}
    nodes = []
    for single in found.nodes:
        node = _of_batch(single, shapes[0][0])
        label = labels.get(node.name)
        if label is None:
            inputs = tuple(names.get(name, name) for name in node.inputs)
            nodes.append(replace(node, inputs=inputs))
            continue
        reason = node.reason
        if node.kind == "operator" and node.place == "BPU":
            reason = f"{node.operator}: {place_operator(node.operator, march).because}"
        elif node.kind == "operator" and _named(label.short, on_cpu):
            reason = "--exclude names it"
        nodes.append(
            replace(
                node,
                name=label.short,
                path=label.path,
                operator=label.operator if node.kind == "operator" else node.operator,
                inputs=tuple(names.get(name, name) for name in node.inputs),
                reason=reason,
            )
        )
    return replace(found, nodes=tuple(nodes))


def _named(path: str, on_cpu: Sequence[str]) -> bool:
    return any(path == named or path.startswith(f"{named}.") for named in on_cpu)


def _of_batch(node: PlanNode, count: int) -> PlanNode:
    """The node with `count` entries along the first axis instead of one."""
    shape = node.shape
    return node if shape is None else replace(node, shape=(shape[0] * count, *shape[1:]))
