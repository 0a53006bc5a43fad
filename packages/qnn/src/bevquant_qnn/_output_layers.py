"""Layers that compute the model's outputs, whose weights may have bits of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx, nn

from bevquant_graph import OPAQUE
from bevquant_qnn._functional_calls import Target
from bevquant_qnn._functional_ops import Followed, FunctionalOp
from bevquant_qnn._result import SkippedModule
from bevquant_qnn._steps import Steps
from bevquant_quantizers import NumBits


def widen_outputs(
    found: Followed, placed: Iterable[tuple[FunctionalOp, nn.Module, Target]], bits: NumBits
) -> Iterator[SkippedModule]:
    """Give the weights of output layers `bits`, and yield a note for each.

    An output layer is one from which the graph leads to an output of the model without another
    layer with a weight, quantized or float. Weights that have a range already keep their bits. The
    inside of a module that cannot be captured is not searched.

    Args:
        found: Operations of the model.
        placed: Products that were given a child since.
        bits: Bits of their weights.
    """
    products = {(op.steps, op.node): child for op, child, _ in placed if op.kind == "product"}
    for steps in found.parts:
        if steps.path(steps.root) or steps.source is None:
            continue  # the outputs of a part are not the model's
        for layer in _output_layers(steps, products):
            quantizer = layer._modules["_weight_quantizer"]
            if quantizer.amax is None and quantizer.num_bits != bits:
                quantizer.num_bits = bits
                path = next(path for path, m in steps.root.named_modules() if m is layer)
                yield SkippedModule(
                    path, f"computes an output of the model: its weight has {bits} bits"
                )


def _output_layers(steps: Steps, products: dict[Any, nn.Module]) -> list[Any]:
    """Quantized layers upstream of the outputs, in the order of the outputs."""
    assert steps.source is not None
    pending = [node for node in reversed(steps.source.outputs) if isinstance(node, fx.Node)]
    layers: dict[nn.Module, None] = {}
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        modules = [products.get((steps, node)), *(call.module for call in steps.calls(node))]
        quantized = [m for m in modules if m is not None and "_weight_quantizer" in m._modules]
        if quantized:
            layers[quantized[0]] = None
        elif node.target is not OPAQUE and not steps.spec(node).product:
            pending += reversed(node.all_input_nodes)
    return list(layers)
