"""Quantized additions and concatenations that the simulator computes in float.

It does so where it cannot tell what reaches them, or where an operand is no tensor of integers. In
a file they are pairs in front of an Add or a Concat like everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

from bevquant_export.dense._graph import Graph, Held
from bevquant_export.dense._results import finished
from bevquant_export.dense._sizes import Sizes
from bevquant_export.dense._source import Ref, Step, integers_of, is_active
from bevquant_qnn import QuantAdd, QuantConcat

__all__ = ["float_join"]


def float_join(graph: Graph, step: Step, read: Callable[[str], Held], sizes: Sizes) -> str | None:
    """Nodes of a `QuantAdd` or `QuantConcat`; ``None`` for other modules."""
    module = step.module
    if not isinstance(module, QuantAdd | QuantConcat) or step.kwargs:
        return None
    several = len(step.args) == 1 and isinstance(step.args[0], list | tuple)
    operands = step.args[0] if several else step.args
    if not operands or not all(isinstance(ref, Ref) for ref in operands):
        return None
    helds = [read(ref.name) for ref in operands]
    if is_active(module.input_quantizer):
        form = integers_of(module.input_quantizer, step.path)
        helds = [finished(graph, step.path, held, form, {}) for held in helds]
    names = [held.name for held in helds]
    if isinstance(module, QuantAdd):
        return graph.node("Add", step.path, names)
    axis = module.dim % len(sizes.of(step.outputs[0]))
    return graph.node("Concat", step.path, names, axis=axis)
