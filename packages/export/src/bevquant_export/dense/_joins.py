"""Quantized additions and concatenations that the simulator computes in float.

It does so where it cannot tell what reaches them, or where an operand is no tensor of integers. In
a file they are pairs in front of an Add or a Concat like everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bevquant_export.dense._graph import Graph, Held
from bevquant_export.dense._results import finished
from bevquant_export.dense._sizes import Sizes
from bevquant_export.dense._source import Ref, Step, integers_of, is_active
from bevquant_graph import own_code
from bevquant_qnn import QuantAdd, QuantConcat


def float_join(
    graph: Graph, step: Step, each: Callable[[Any], list[Held]], sizes: Sizes
) -> str | None:
    """Nodes of a `QuantAdd` or `QuantConcat`; ``None`` for other modules.

    Args:
        graph: Where nodes are added.
        step: The step.
        each: A tuple of values, or one value that is a tuple, to its tensors.
        sizes: Shapes.
    """
    module = step.module
    if not isinstance(module, QuantAdd | QuantConcat) or own_code(module) or step.kwargs:
        return None
    single = len(step.args) == 1
    operands = step.args[0] if single else step.args
    if not isinstance(operands, Ref | list | tuple):
        return None
    helds = each(operands)
    if is_active(module.input_quantizer):
        form = integers_of(module.input_quantizer, step.path)
        helds = [finished(graph, step.path, held, form, {}) for held in helds]
    names = [held.name for held in helds]
    if isinstance(module, QuantAdd):
        return graph.node("Add", step.path, names)
    axis = module.dim % len(sizes.of(step.outputs[0]))
    return graph.node("Concat", step.path, names, axis=axis)
