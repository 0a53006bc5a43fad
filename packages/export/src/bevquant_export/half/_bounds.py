r"""Bounds of every tensor of a file, for every frame, by interval arithmetic.

Sources are constants, ranges of pairs (the output of a DequantizeLinear is within its range for any
input) and the recorded ranges of the calibration. Each operator's rule continues from them:

.. math:: a + b \in [a_0 + b_0,\; a_1 + b_1], \quad
          x W \in \Bigl[\sum_i \min(x_0 w_i, x_1 w_i),\; \sum_i \max(x_0 w_i, x_1 w_i)\Bigr]

and so on. Results without a rule are unbounded. A bound is right, and may be wide: x − x has twice
the range of x. Quotients whose terms depend on each other have tighter rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bevquant_export.half import _intervals as products
from bevquant_export.half._intervals import (
    INF,
    RENAMED,
    TRUTH,
    UNKNOWN,
    Bound,
    Reading,
    Rule,
    bound_of,
    inverse,
    joined,
    product,
    times,
)
from bevquant_int8sim.program import FLOAT8

if TYPE_CHECKING:
    import onnx_ir as ir

_FLOAT8 = {str(form.dtype).removeprefix("torch."): form.high for form in FLOAT8.values()}


def negative(b: Bound) -> Bound:
    return Bound(-b.high, -b.low, b.whole)


def _monotone(function: Callable[[float], float], low: float = -INF) -> Rule:
    """Bound of an increasing function, defined from `low` on."""

    def bounded(at: Reading) -> Bound:
        x = at[0]
        with np.errstate(all="ignore"):
            ends = [float(function(np.float64(max(end, low)))) for end in x[:2]]
        return UNKNOWN if any(math.isnan(end) for end in ends) else Bound(ends[0], ends[1])

    return bounded


def _from(least: float) -> Rule:
    """Bound of an activation whose minimum is `least`, and which is below max(x, 0)."""
    return lambda at: Bound(least, max(at[0].high, 0.0))


def _fixed(low: float, high: float, whole: bool = False) -> Rule:
    return lambda at: Bound(low, high, whole)


def _add(at: Reading) -> Bound:
    a, b = at[0], at[1]
    if at.node.op_type == "Sub":
        b = negative(b)
    return Bound(a.low + b.low, a.high + b.high, a.whole and b.whole)


def _clip(at: Reading) -> Bound:
    x = at[0]
    ends = [at.attribute("min", -INF), at.attribute("max", INF)]
    for slot in (1, 2):
        if at.input(slot) is not None:
            ends[slot - 1] = at[slot].low if slot == 1 else at[slot].high
    low, high = min(max(x.low, ends[0]), ends[1]), min(max(x.high, ends[0]), ends[1])
    return Bound(low, high, x.whole and all(e % 1 == 0 for e in ends if math.isfinite(e)))


def _extreme(pick: Callable[[Any], float]) -> Rule:
    def bounded(at: Reading) -> Bound:
        given = at.given()
        lows, highs, wholes = zip(*given, strict=True)
        return Bound(pick(lows), pick(highs), all(wholes))

    return bounded


def _where(at: Reading) -> Bound:
    a, b = at[1], at[2]
    kind, looked_at = tested(at.bounds, at.node.inputs[0])
    if kind == "IsNaN" or (kind == "IsInf" and looked_at.largest < INF):
        return b  # of finite numbers nothing is replaced
    constants = [at.array(slot) for slot in (1, 2)]
    # Infinity in a place marks it, and has no range of its own.
    marks = [c is not None and c.size > 0 and np.isinf(c).all() for c in constants]
    if any(marks) and not all(marks):
        return b if marks[0] else a
    return joined([a, b])


def tested(bounds: Bounds, condition: ir.Value | None) -> tuple[str, Bound]:
    """The test of a condition, IsNaN or IsInf, and the bound of the tested values."""
    node = None if condition is None else condition.producer()
    if node is None:
        return "", UNKNOWN
    if node.op_type in ("IsNaN", "IsInf"):
        return node.op_type, bounds[node.inputs[0]]
    if node.op_type == "Equal":
        for one, other in (node.inputs[:2], reversed(node.inputs[:2])):
            value = bounds.array(other)
            if value is not None and value.size and np.isinf(value).all():
                return "IsInf", bounds[one]
    if node.op_type == "And":
        for value in node.inputs:
            kind, bound = tested(bounds, value)
            if kind:
                return kind, bound
    return "", UNKNOWN


def _sum(at: Reading) -> Bound:
    n, x = at.reduced(), at[0]
    return Bound(min(times(n, x.low), x.low), max(times(n, x.high), x.high), x.whole)


def _cumulative(at: Reading) -> Bound:
    shape, axis, x = at.shape(0), at.array(1), at[0]
    if shape is None or axis is None or shape[int(axis.flat[0])] is None:
        return UNKNOWN._replace(whole=x.whole)
    n = float(shape[int(axis.flat[0])] or 0)
    low, high = min(times(n, x.low), x.low, 0.0), max(times(n, x.high), x.high, 0.0)
    return Bound(low, high, x.whole)


def _dequantize(at: Reading) -> Bound:
    value = at.bounds.array(at.node.outputs[0])
    if value is not None:
        return bound_of(value)
    scale, zero = at.array(1), at.array(2)
    if scale is None:
        return UNKNOWN
    zeros = np.zeros((), np.int8) if zero is None else zero
    largest = float(np.abs(scale).max())
    if top := _FLOAT8.get(zeros.dtype.name):
        return Bound(-top * largest, top * largest)
    limits = np.iinfo(zeros.dtype)
    steps = [float(limits.min) - float(zeros.max()), float(limits.max) - float(zeros.min())]
    if limits.bits > 8:
        return UNKNOWN
    return Bound(steps[0] * largest, steps[1] * largest)


def _softmax_log(at: Reading) -> Bound:
    x = at[0]
    shape = at.shape(0)
    n = shape[int(at.attribute("axis", -1))] if shape else None
    return UNKNOWN if n is None else Bound(x.low - x.high - math.log(max(n, 1)), 0.0)


def _filled(at: Reading) -> Bound:
    value = at.attribute("value")
    return Bound(0.0, 0.0, True) if value is None else bound_of(value.numpy())


def _range(at: Reading) -> Bound:
    start, limit, step = at.given()
    if not math.isfinite(limit.largest):
        return Bound(-INF, INF, start.whole and step.whole)
    return joined([start, limit])._replace(whole=start.whole and step.whole)


def _cast(at: Reading) -> Bound:
    x = at[0]
    # TensorProto's integers and truth values.
    integer = at.attribute("to") in (2, 3, 4, 5, 6, 7, 9, 12, 13)
    return x._replace(whole=True) if integer else x


def _leaky(at: Reading) -> Bound:
    slope = float(at.attribute("alpha", 0.01))
    slopes = at[1] if at.node.op_type == "PRelu" else Bound(slope, slope)
    x = at[0]
    below = product(Bound(min(x.low, 0.0), min(x.high, 0.0)), slopes)
    above = Bound(max(x.low, 0.0), max(x.high, 0.0))
    return joined([below, above])._replace(whole=False)


def _elu(at: Reading) -> Bound:
    alpha = {"Selu": 1.7581, "Elu": float(at.attribute("alpha", 1.0))}.get(at.node.op_type, 1.0)
    gain = 1.0508 if at.node.op_type == "Selu" else 1.0
    return Bound(-abs(alpha) if at[0].low < 0 else 0.0, max(gain * at[0].high, 0.0))


def _pad(at: Reading) -> Bound:
    value = Bound(0.0, 0.0, True) if at.input(2) is None else at[2]
    return joined([at[0], value]) if at.attribute("mode", "constant") == "constant" else at[0]


def _with_zero(at: Reading) -> Bound:
    return joined([at[0], Bound(0.0, 0.0, True)])


def _resized(at: Reading) -> Bound:
    x = at[0]
    if at.attribute("mode", "nearest") == "nearest":
        return x
    wide = 1.5 * x.largest if at.attribute("mode") == "cubic" else 0.0
    return Bound(min(x.low, -wide), max(x.high, wide))


def _scattered(at: Reading) -> Bound:
    found = joined([at[0], at[2]])
    return found if at.attribute("reduction", "none") == "none" else UNKNOWN


def _mean(at: Reading) -> Bound:
    return at[0]._replace(whole=False)


_SELECTED = RENAMED | set(
    "Slice Expand Tile Gather GatherElements GatherND DepthToSpace SpaceToDepth Split MaxPool "
    "GlobalMaxPool ReduceMax ReduceMin TopK QuantizeLinear".split()
)


RULES: dict[str, Rule] = {
    **dict.fromkeys(_SELECTED, lambda at: at[0]),
    **dict.fromkeys(("Floor", "Ceil", "Round"), lambda at: at[0]._replace(
        low=math.floor(at[0].low) if math.isfinite(at[0].low) else -INF,
        high=math.ceil(at[0].high) if math.isfinite(at[0].high) else INF, whole=True)),
    **dict.fromkeys(
        "Greater GreaterOrEqual Less LessOrEqual Equal And Or Not Xor IsNaN IsInf".split(),
        lambda at: TRUTH,
    ),
    "Abs": lambda at: Bound(at[0].least, at[0].largest, at[0].whole),
    "Acos": _fixed(0.0, math.pi), "Add": _add, "Asin": _fixed(-2.0, 2.0),
    "Atan": _fixed(-2.0, 2.0), "AveragePool": lambda at: _with_zero(at)._replace(whole=False),
    "BatchNormalization": products.batch_norm,
    "Cast": _cast, "Clip": _clip, "Concat": lambda at: joined(at.given()),
    "ConstantOfShape": _filled, "Conv": products.conv, "ConvTranspose": products.conv_transpose,
    "Cos": _fixed(-1.0, 1.0), "CumSum": _cumulative, "DequantizeLinear": _dequantize,
    "Div": products.div, "Einsum": products.einsum, "Elu": _elu, "Erf": _fixed(-1.0, 1.0),
    "Exp": _monotone(np.exp), "Gelu": _from(-0.18), "Gemm": products.gemm,
    "GlobalAveragePool": _mean, "GridSample": _with_zero, "HardSigmoid": _fixed(0.0, 1.0),
    "HardSwish": _from(-0.375), "InstanceNormalization": products.norm_rule,
    "LayerNormalization": products.norm_rule, "LeakyRelu": _leaky, "Log": _monotone(np.log, 0.0),
    "LogSoftmax": _softmax_log, "MatMul": products.matmul, "Max": _extreme(max),
    "Min": _extreme(min), "Mish": _from(-0.31), "Mul": products.mul,
    "Neg": lambda at: negative(at[0]),
    "OneHot": lambda at: at[2], "PRelu": _leaky, "Pad": _pad, "Pow": products.pow, "Range": _range,
    "Reciprocal": lambda at: inverse(at[0]),
    "ReduceL1": lambda at: Bound(0.0, times(at.reduced(), at[0].largest), at[0].whole),
    "ReduceL2": lambda at: Bound(0.0, math.sqrt(products.sum_of_squares(at).high)),
    "ReduceMean": _mean, "ReduceSum": _sum, "ReduceSumSquare": products.sum_of_squares,
    "Relu": lambda at: Bound(max(at[0].low, 0.0), max(at[0].high, 0.0), at[0].whole),
    "Resize": _resized, "ScatterElements": _scattered, "ScatterND": _scattered, "Selu": _elu,
    "Sigmoid": _monotone(lambda v: 0.5 * (1 + np.tanh(0.5 * v))),
    "Sign": _fixed(-1.0, 1.0, True), "Sin": _fixed(-1.0, 1.0), "Softmax": _fixed(0.0, 1.0),
    "Softplus": _monotone(lambda v: np.logaddexp(0.0, v)), "Softsign": _fixed(-1.0, 1.0),
    "Sqrt": _monotone(np.sqrt, 0.0), "Sub": _add, "Tanh": _monotone(np.tanh),
    "Trilu": _with_zero, "Where": _where,
}  # fmt: skip


HEAD_ROOM = 2.0  # a later frame may have values beyond those of every calibration frame
_BOOL = 9  # TensorProto's number


class Bounds:
    """Bounds of all tensors of a graph, whose nodes are in order, after shape inference.

    `known` gives the largest value of any calibration frame, and whether all were whole numbers.
    """

    def __init__(self, graph: ir.Graph, known: Mapping[str, tuple[float, bool]]) -> None:
        self._known: dict[str | None, tuple[float, bool]] = dict(known.items())
        self._arrays: dict[ir.Value, Any] = {}
        self._of: dict[ir.Value | None, Bound] = {}
        for node in reversed(graph):  # a reshaped tensor has the range of what it becomes
            if node.op_type in RENAMED and (made := self._known.get(node.outputs[0].name)):
                (value,) = filter(None, node.inputs[:1])
                self._known.setdefault(value.name, made)
        for port in graph.inputs:
            truth = port.dtype == _BOOL
            self._of[port] = self._narrowed(port, TRUTH if truth else UNKNOWN)
        for node in graph:
            rule = None if node.domain else RULES.get(node.op_type)
            found = UNKNOWN if rule is None else rule(Reading(self, node))
            for value in node.outputs:
                self._of[value] = self._narrowed(value, found)

    def __getitem__(self, value: ir.Value | None) -> Bound:
        if value not in self._of:
            array = self.array(value)
            self._of[value] = UNKNOWN if array is None else bound_of(array)
        return self._of[value]

    def _narrowed(self, value: ir.Value, bound: Bound) -> Bound:
        if value.name not in self._known:
            return bound
        largest, whole = self._known[value.name]
        return bound.within(HEAD_ROOM * largest, whole)

    def squares(self, node: ir.Node) -> float:
        """The largest sum of squares of a reduction."""
        return RULES["ReduceSumSquare"](Reading(self, node)).high

    def array(self, value: ir.Value | None) -> Any:
        """Values of a constant (layout operators, dequantization included); None for others."""
        if value is None:
            return None
        if value not in self._arrays:
            self._arrays[value] = self._constant(value)
        return self._arrays[value]

    def _constant(self, value: ir.Value) -> Any:
        from onnx_ir.convenience import get_const_tensor

        tensor, node = get_const_tensor(value), value.producer()
        if tensor is not None:
            return tensor.numpy()
        fold = None if node is None else _FOLDED.get(node.op_type)
        x = None if node is None or fold is None else self.array(node.inputs[0])
        return None if x is None or fold is None else fold(self, node, x)


def _dequantized(bounds: Bounds, node: Any, x: Any) -> Any:
    if x.dtype.kind == "f":
        return x
    at = Reading(bounds, node)
    scale, zero = np.asarray(at.array(1), np.float64), at.array(2)
    zero = np.zeros((), np.int64) if at.input(2) is None else zero
    axis, block = at.attribute("axis", 1), at.attribute("block_size", 0)
    if block:
        scale = scale.repeat(block, axis).take(range(x.shape[axis]), axis)
    elif scale.size > 1:
        shape = [-1 if i == axis % x.ndim else 1 for i in range(x.ndim)]
        scale, zero = scale.reshape(shape), np.asarray(zero).reshape(shape)
    return (x.astype(np.float64) - np.asarray(zero).astype(np.float64)) * scale


_FOLDED: dict[str, Callable[[Bounds, Any, Any], Any]] = {
    "Identity": lambda bounds, node, x: x,
    # A weight in front of its pair lies on the grid of the pair.
    "QuantizeLinear": lambda bounds, node, x: x,
    "DequantizeLinear": _dequantized,
    "Transpose": lambda bounds, node, x: np.transpose(x, node.attributes.get_ints("perm")),
}
