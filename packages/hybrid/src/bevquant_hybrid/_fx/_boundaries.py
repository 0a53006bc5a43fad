"""Quantize behind CPU nodes that a BPU node reads, dequantize before those that read one."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.fx import Graph, Node

from bevquant_hybrid._fx._placement import Kind, Placement
from bevquant_hybrid.nn.qat.stubs import DeQuantStub

__all__ = ["BOUNDARY", "insert_boundaries"]

Make = Callable[[Node], nn.Module]
BOUNDARY = "boundary"  # key of a node's meta


def insert_boundaries(graph: Graph, root: nn.Module, placement: Placement, make: Make) -> None:
    """Insert what carries values between CPU and BPU, in one pass in the graph's order.

    Behind a CPU node ``n`` from which a BPU node is reachable through views alone:
    ``n_activation_post_process``, which `make` builds. Before a CPU node, for its i-th input that
    comes from the BPU: ``n_input_dequant_i``, all of them one module ``n_input_dequant``.

    Args:
        graph: Nodes, changed in place.
        root: Gets the new modules.
        placement: The kinds of the nodes.
        make: The fake quantizer for a node's output.
    """
    for node in list(graph.nodes):
        if placement.kinds[node] is Kind.CPU:
            _quantize_behind(graph, root, node, placement, make)
            _dequantize_before(graph, root, node, placement)


def _needs_quantized(user: Node, placement: Placement) -> bool:
    """Whether a node computes on the BPU, or passes its input on to one that does."""
    kind = placement.kinds[user]
    if kind is Kind.PASS:
        return any(_needs_quantized(next_user, placement) for next_user in user.users)
    return kind is Kind.BPU


def _quantize_behind(
    graph: Graph, root: nn.Module, node: Node, placement: Placement, make: Make
) -> None:
    # Readers on the CPU keep the float value.
    readers = [user for user in node.users if _needs_quantized(user, placement)]
    if not readers:
        return
    name = f"{node.name}_activation_post_process"
    root.add_module(name, make(node))
    with graph.inserting_after(node):
        made = graph.create_node("call_module", name, (node,), name=name)
    made.meta.update({BOUNDARY: "quantize", "scope": name})
    placement.kinds[made] = Kind.QUANT
    for user in readers:
        user.replace_input_with(node, made)


def _dequantize_before(graph: Graph, root: nn.Module, node: Node, placement: Placement) -> None:
    quantized = [
        value
        for value in placement.inputs(node)
        if placement.kinds[placement.source(value)] in (Kind.BPU, Kind.QUANT)
    ]
    name = f"{node.name}_input_dequant"
    if quantized:
        stub = DeQuantStub()
        stub.forced = placement.forced(node)
        root.add_module(name, stub)
    for index, value in enumerate(quantized):
        with graph.inserting_before(node):
            made = graph.create_node("call_module", name, (value,), name=f"{name}_{index}")
        made.meta.update({BOUNDARY: "dequantize", "scope": name})
        placement.kinds[made] = Kind.DEQUANT
        node.replace_input_with(value, made)
