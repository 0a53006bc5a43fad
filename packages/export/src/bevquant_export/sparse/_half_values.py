r"""Whether float16 holds the values between the layers of a sparse file, for every frame.

An engine keeps these in float16: outputs of fp16 layers, sums, and outputs of int8 layers that an
fp16 layer, a sum or the end of the file reads. Their interval follows from weights, ranges and
operands,

.. math:: \Bigl[\sum_i \min(x_0 w_i, x_1 w_i) + b,\; \sum_i \max(x_0 w_i, x_1 w_i) + b\Bigr],

limited to the largest value of all calibration frames, where known
(`bevquant_quantizers.float_ranges`), else to twice that of the example and batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from bevquant_export.dense._bound import UNKNOWN, Bound, joined
from bevquant_export.dense._bound_products import weighted
from bevquant_export.dense._bounds import HEAD_ROOM
from bevquant_export.sparse._graph import Add, Concat, Conv, Fold, Graph, Node, Relu, Select, Steps
from bevquant_export.sparse._half_precision import LARGEST_HALF
from bevquant_export.sparse._observe import Seen
from bevquant_quantizers import float_ranges

_STEPS = 127
_OUTPUT = "output"


def check_half_values(graph: Graph, model: nn.Module, seen: Mapping[str, Seen]) -> None:
    """Refuse a file whose float16 values may overflow.

    Args:
        graph: Graph of the file.
        model: Model whose modules have the ranges.
        seen: Values of the example and the batches, see `observe`.

    Raises:
        ValueError: A layer or a sum may exceed 65,504; the message names module and value.
    """
    largest = _Largest(graph, model, seen)
    of: dict[str, Bound] = {}
    for node in graph.nodes:
        for name in node.inputs:
            of.setdefault(name, largest.cut(name, UNKNOWN))  # the input of the file
        before = largest.made(node, _bound(node, [of[name] for name in node.inputs]))
        bound = largest.cut(node.y, _behind_relu(node, before))
        of[node.y] = bound
        if node.makes_int8 or node.y in largest.before_relu:
            continue  # in front of a ReLU, −∞ equals any negative number
        if math.inf > bound.largest > LARGEST_HALF:
            raise ValueError(
                f"export_sparse_onnx: {node.path or 'the model'}: {largest.how(node, bound)}, "
                f"beyond float16 (largest {LARGEST_HALF:g}), in which the engine holds them; "
                "divide weight and bias of the layers that make them by a constant, multiply the "
                "weights of the layers that read them by it, and calibrate again"
            )


class _Largest:
    """Largest values of tensors, from the calibration or from example and batches."""

    def __init__(self, graph: Graph, model: nn.Module, seen: Mapping[str, Seen]) -> None:
        self._recorded = float_ranges(model)
        self._of: dict[str, float] = {}
        self.before_relu = {node.x for node in graph.nodes if isinstance(node, Relu)}
        for node in graph.nodes:
            if not isinstance(node, Conv):
                continue
            given = [v for k, v in self._recorded.get(node.path, {}).items() if k != _OUTPUT]
            if len(given) == 1:
                self._note(node.x, given[0].largest)
            elif node.y in seen and seen[node.y].largest:
                self._note(node.x, HEAD_ROOM * seen[node.y].largest)

    def _note(self, name: str, largest: float) -> None:
        self._of[name] = min(largest, self._of.get(name, math.inf))

    def cut(self, name: str, bound: Bound) -> Bound:
        """Bound of a tensor, from its consumers."""
        return bound.within(self._of[name], False) if name in self._of else bound

    def made(self, node: Node, bound: Bound) -> Bound:
        """Bound in front of a layer's ReLU, from its module's result."""
        made = self._made(node)
        return bound if made is None else bound.within(made, False)

    def _made(self, node: Node) -> float | None:
        found = self._recorded.get(node.path, {}).get(_OUTPUT)
        return found.largest if isinstance(node, Conv) and found is not None else None

    def how(self, node: Node, bound: Bound) -> str:
        """Magnitude of a node's values, in words."""
        if self._made(node) == bound.largest or self._of.get(node.y) == bound.largest:
            return f"its values reach {bound.largest:g} in a calibration frame"
        return f"its values may reach {bound.largest:g}, by its operands' ranges and weights"


def _bound(node: Node, given: list[Bound]) -> Bound:
    """Bound in front of the node's own ReLU."""
    first = given[0] if given else UNKNOWN
    if isinstance(node, Conv):
        x = _quantized(first, node.input_range if node.precision == "int8" else None)
        made = weighted(x, node.weight.double().numpy(), tuple(range(1, node.weight.dim())))
        bias = node.bias.double()
        low, high = (float(bias.min()), float(bias.max())) if len(bias) else (0.0, 0.0)
        return Bound(made.low + low, made.high + high)
    if isinstance(node, Add):
        ranges = (node.range_x, node.range_other) if node.precision == "int8" else (None, None)
        x, other = (_quantized(b, r) for b, r in zip(given, ranges, strict=True))
        return Bound(x.low + other.low, x.high + other.high)
    if isinstance(node, Concat):
        return joined(given)
    if isinstance(node, Fold):
        return UNKNOWN
    return UNKNOWN if isinstance(node, Steps) else joined([first, Bound(0.0, 0.0)])


def _quantized(bound: Bound, amax: float | None) -> Bound:
    return bound if amax is None else bound.within(amax * (1 + 1 / _STEPS), False)


def _behind_relu(node: Node, bound: Bound) -> Bound:
    relu = isinstance(node, Relu) or (isinstance(node, Conv | Select) and node.activation == "ReLU")
    return Bound(max(bound.low, 0.0), max(bound.high, 0.0)) if relu else bound
