r"""Bounds of every tensor of a file, for every frame: interval arithmetic.

Sources are constants, ranges of pairs (the output of a DequantizeLinear is within its range for any
input) and the recorded ranges of the calibration. Each operator's rule continues from them:

.. math:: a + b \in [a_0 + b_0,\; a_1 + b_1], \quad
          x W \in \Bigl[\sum_i \min(x_0 w_i, x_1 w_i),\; \sum_i \max(x_0 w_i, x_1 w_i)\Bigr]

and so on. Results without a rule are unbounded. A bound is right, and may be wide: x − x has twice
the range of x. Three quotients have tighter rules, because their terms depend on each other: a
softmax sums to 1, so its product with values is between these; x/‖x‖ is in [−1, 1]; x over the root
of the mean square of n values is in [−√n, √n].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bevquant_export.dense._bound import RENAMED, TRUTH, UNKNOWN, Bound, Reading, bound_of
from bevquant_export.dense._bound_rules import RULES

HEAD_ROOM = 2.0  # a later frame may have values beyond those of every calibration frame
_BOOL = 9


class Bounds:
    """Bounds of all tensors of a graph.

    Args:
        graph: An ONNX graph with nodes in order, after shape inference (`shapes`).
        shapes: Tensor to its sizes, None for free sizes.
        known: Tensor to (largest value of any calibration frame, whether all were whole numbers).
    """

    def __init__(
        self,
        graph: Any,
        shapes: Mapping[str, list[int | None]],
        known: Mapping[str, tuple[float, bool]],
    ) -> None:
        from onnx import numpy_helper

        self.shapes, self._known = shapes, dict(known)
        self.makers = {name: node for node in graph.node for name in node.output}
        self._constants = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        self._of: dict[str, Bound] = {}
        for node in reversed(graph.node):  # a reshaped tensor has the range of what it becomes
            if node.op_type in RENAMED and node.output[0] in self._known:
                self._known.setdefault(node.input[0], self._known[node.output[0]])
        for port in graph.input:
            truth = port.type.tensor_type.elem_type == _BOOL
            self._of[port.name] = self._narrowed(port.name, TRUTH if truth else UNKNOWN)
        for node in graph.node:
            rule = RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
            found = UNKNOWN if rule is None else rule(Reading(self, node))
            for name in node.output:
                self._of[name] = self._narrowed(name, found)

    def __getitem__(self, name: str) -> Bound:
        if name not in self._of:
            value = self.array(name)
            self._of[name] = UNKNOWN if value is None else bound_of(value)
        return self._of[name]

    def _narrowed(self, name: str, bound: Bound) -> Bound:
        if name not in self._known:
            return bound
        largest, whole = self._known[name]
        return bound.within(HEAD_ROOM * largest, whole)

    def squares(self, node: Any) -> float:
        """The largest sum of squares of a reduction."""
        return RULES["ReduceSumSquare"](Reading(self, node)).high

    def array(self, name: str) -> Any:
        """Values of a constant (layout operators, dequantization included); None for others."""
        if name in self._constants or name not in self.makers:
            return self._constants.get(name)
        node = self.makers[name]
        if node.op_type == "Constant":
            from onnx import helper, numpy_helper

            held = helper.get_attribute_value(node.attribute[0])
            return numpy_helper.to_array(held) if hasattr(held, "raw_data") else np.asarray(held)
        x = self.array(node.input[0]) if node.input and node.op_type in _FOLDED else None
        if x is None:
            return None
        made = _FOLDED[node.op_type](self, node, x)
        self._constants[name] = made
        return made


def _dequantized(bounds: Bounds, node: Any, x: Any) -> Any:
    if x.dtype.kind == "f":
        return x
    scale = np.asarray(bounds.array(node.input[1]), np.float64)
    zero = bounds.array(node.input[2]) if len(node.input) > 2 else np.zeros((), np.int64)
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    if scale.size > 1:
        shape = [-1 if i == axis % x.ndim else 1 for i in range(x.ndim)]
        scale, zero = scale.reshape(shape), np.asarray(zero).reshape(shape)
    return (x.astype(np.float64) - np.asarray(zero).astype(np.float64)) * scale


def _transposed(bounds: Bounds, node: Any, x: Any) -> Any:
    order = next((list(a.ints) for a in node.attribute if a.name == "perm"), None)
    return np.transpose(x, order)


_FOLDED: dict[str, Callable[[Bounds, Any, Any], Any]] = {
    "Identity": lambda bounds, node, x: x,
    # A weight in front of its pair lies on the grid of the pair.
    "QuantizeLinear": lambda bounds, node, x: x,
    "DequantizeLinear": _dequantized,
    "Transpose": _transposed,
}
