"""Intervals of numbers, and the interval of a product, a quotient, a norm or a sum of products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

INF = math.inf
RENAMED = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"}
# What hands on some of its input's values.


class Bound(NamedTuple):
    """An interval."""

    low: float
    high: float
    # Whether every value is a whole number.
    whole: bool = False

    @property
    def largest(self) -> float:
        """Largest magnitude."""
        return max(abs(self.low), abs(self.high))

    @property
    def least(self) -> float:
        """Smallest magnitude: 0 where the interval contains 0."""
        return max(self.low, -self.high, 0.0)

    def within(self, largest: float, whole: bool) -> Bound:
        """The part with magnitudes up to `largest`; the interval itself where it is empty."""
        low, high = max(self.low, -largest), min(self.high, largest)
        return Bound(low, high, self.whole or whole) if low <= high else self


UNKNOWN = Bound(-INF, INF)
TRUTH = Bound(0.0, 1.0, True)


def joined(bounds: list[Bound]) -> Bound:
    """The smallest interval that contains all of them."""
    if not bounds:
        return UNKNOWN
    lows, highs, wholes = zip(*bounds, strict=True)
    return Bound(min(lows), max(highs), all(wholes))


def shape_of(value: ir.Value | None) -> list[int | None] | None:
    """Sizes of a tensor, None for free ones; None where its shape is unknown."""
    if value is None or value.shape is None:
        return None
    return [size if isinstance(size, int) else None for size in value.shape]


def producer(node: ir.Node, slot: int) -> ir.Node | None:
    """Node that makes an input."""
    value = node.inputs[slot]
    return None if value is None else value.producer()


def times(a: float, b: float) -> float:
    """Product with 0 · ∞ = 0: unbounded values are still finite."""
    return 0.0 if a == 0 or b == 0 else a * b


def product(a: Bound, b: Bound) -> Bound:
    """Bound of the product of two independent values."""
    ends = [times(x, y) for x in a[:2] for y in b[:2]]
    return Bound(min(ends), max(ends), a.whole and b.whole)


def inverse(b: Bound) -> Bound:
    if b.low > 0 or b.high < 0:
        return Bound(1 / b.high, 1 / b.low)
    if b.low == 0 < b.high:
        return Bound(1 / b.high, INF)
    return UNKNOWN


def bound_of(value: Any) -> Bound:
    """Bound of a constant. Infinite values mark places and are ignored beside finite ones."""
    numbers = np.asarray(value)
    if not numbers.size or numbers.dtype.kind not in "fiub":
        return UNKNOWN
    numbers = numbers.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return UNKNOWN
    whole = bool((finite == np.round(finite)).all())
    return Bound(float(finite.min()), float(finite.max()), whole)


class Reading:
    """A node and the bounds of its inputs."""

    def __init__(self, bounds: Any, node: ir.Node) -> None:
        self.bounds, self.node = bounds, node

    def __getitem__(self, slot: int) -> Bound:
        found: Bound = self.bounds[self.node.inputs[slot]]
        return found

    def input(self, slot: int) -> ir.Value | None:
        """An input; None where it is missing."""
        inputs = self.node.inputs
        return inputs[slot] if slot < len(inputs) else None

    def given(self) -> list[Bound]:
        """Bounds of all inputs."""
        return [self.bounds[value] for value in self.node.inputs if value is not None]

    def array(self, slot: int) -> Any:
        """Values of a constant input; None for another input, or a missing one."""
        return self.bounds.array(self.input(slot))

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute of the node."""
        found = self.node.attributes.get(name)
        return default if found is None else found.value

    def shape(self, slot: int) -> list[int | None] | None:
        """Shape of an input; None where unknown."""
        value = self.node.inputs[slot]
        array = self.bounds.array(value)
        return shape_of(value) if array is None else list(array.shape)

    def is_last(self) -> bool:
        """Whether the node works along the last axis."""
        axis, shape = int(self.attribute("axis", -1)), self.shape(0)
        return axis == -1 or (shape is not None and axis == len(shape) - 1)

    def reduced(self) -> float:
        """Number of values that a reduction combines; infinite where a size is free."""
        shape, axes = self.shape(0), self.attribute("axes")
        if axes is None and self.input(1) is not None:
            axes = self.array(1)
            if axes is None:
                return INF
        if shape is None:
            return INF
        sizes = shape if axes is None else [shape[int(axis)] for axis in axes]
        return INF if None in sizes else float(math.prod(size or 0 for size in sizes))


Rule = Callable[[Reading], Bound]


def sum_of_squares(at: Reading) -> Bound:
    n, x = at.reduced(), at[0]
    return Bound(0.0, times(n, x.largest**2), x.whole)


def mul(at: Reading) -> Bound:
    if at.node.inputs[0] is at.node.inputs[1]:
        return square(at[0])
    rooted = over_root(at, *at.node.inputs) or over_root(at, *reversed(at.node.inputs))
    found = product(at[0], at[1])
    return found if rooted is None else found.within(rooted, False)


def square(x: Bound) -> Bound:
    return Bound(x.least**2, x.largest**2, x.whole)


def div(at: Reading) -> Bound:
    found = product(at[0], inverse(at[1]))
    rooted = norm_of(at, *at.node.inputs, root=False)
    found = found._replace(whole=False)
    return found if rooted is None else found.within(rooted, False)


def over_root(at: Reading, x: Any, factor: Any) -> float | None:
    """Bound of x · (1/root), as of x divided by the root."""
    node = factor.producer()
    while node is not None and node.op_type in RENAMED | {"Expand"}:
        node = node.inputs[0].producer()
    if node is None or node.op_type != "Reciprocal":
        return None
    return norm_of(at, x, node.inputs[0], root=False)


def norm_of(at: Reading, x: Any, under: Any, *, root: bool) -> float | None:
    """Largest |x| over a root of x's own squares; None where `under` is another value."""
    bounds = at.bounds
    node = under.producer()
    if node is None:
        return None
    first: Any = node.inputs[0] if node.inputs else None
    if node.op_type in RENAMED | {"Expand", "Cast"}:
        return norm_of(at, x, first, root=root)
    if node.op_type == "Sqrt" and not root:
        return norm_of(at, x, first, root=True)
    if node.op_type in ("Add", "Max"):
        for one, other in (node.inputs[:2], reversed(node.inputs[:2])):
            if bounds[other].low >= 0 and bounds.array(other) is not None:
                return norm_of(at, x, one, root=root)
        return None
    if node.op_type == "Clip" and Reading(bounds, node).input(2) is None:
        return norm_of(at, x, first, root=root)
    # x/‖x‖ is in [−1, 1].
    if node.op_type == "ReduceL2" and not root and first is x:
        return 1.0
    if node.op_type not in ("ReduceMean", "ReduceSum") or not root:
        return None
    squares = first.producer()
    if squares is None or squares.inputs[0] is not x or not is_square(bounds, squares):
        return None
    # x over the root of the mean square of n values is in [−√n, √n].
    return math.sqrt(Reading(bounds, node).reduced()) if node.op_type == "ReduceMean" else 1.0


def is_square(bounds: Any, node: ir.Node) -> bool:
    if node.op_type == "Mul":
        return node.inputs[0] is node.inputs[1]
    power = bounds.array(node.inputs[1]) if node.op_type == "Pow" else None
    return power is not None and power.size == 1 and float(power.flat[0]) == 2


def pow(at: Reading) -> Bound:
    x, power = at[0], at.array(1)
    if power is None or power.size != 1:
        return UNKNOWN
    p = float(power.flat[0])
    if p < 0:
        return powered(inverse(x), -p) if x.low >= 0 else UNKNOWN
    return powered(x, p)


def powered(x: Bound, p: float) -> Bound:
    def end(value: float) -> float:
        try:
            return float(value**p)
        except OverflowError:
            return INF

    if p == 0:
        return Bound(1.0, 1.0, True)
    if p % 2 == 0:
        return Bound(end(x.least), end(x.largest), x.whole)
    if p % 1 == 0:
        low = -end(-x.low) if x.low < 0 else end(x.low)
        high = -end(-x.high) if x.high < 0 else end(x.high)
        return Bound(low, high, x.whole)
    return Bound(end(max(x.low, 0.0)), end(max(x.high, 0.0)))


def matmul(at: Reading) -> Bound:
    for slot, axis in ((1, -2), (0, -1)):
        weight = at.array(slot)
        if weight is not None and weight.ndim:
            return weighted(at[1 - slot], weight, axis if weight.ndim > 1 else 0)
    a, b = at[0], at[1]
    maker = producer(at.node, 0)
    # A softmax sums to 1, so its product with values is between these.
    if maker is not None and maker.op_type == "Softmax" and Reading(at.bounds, maker).is_last():
        return joined([b, Bound(0.0, 0.0)])._replace(whole=False)
    shape = at.shape(0)
    if shape is None or shape[-1] is None:
        return UNKNOWN
    largest = times(float(shape[-1]), times(a.largest, b.largest))
    return Bound(-largest, largest, a.whole and b.whole)


def weighted(x: Bound, weight: Any, axes: int | tuple[int, ...]) -> Bound:
    """Bound of sums of products with a constant over `axes`, and of all partial sums."""
    w = np.asarray(weight, np.float64)
    low, high = min(x.low, 0.0), max(x.high, 0.0)
    positive, negative = np.maximum(w, 0).sum(axes), np.minimum(w, 0).sum(axes)
    lows = _each_times(positive, low) + _each_times(negative, high)
    highs = _each_times(positive, high) + _each_times(negative, low)
    whole = x.whole and bool((w == np.round(w)).all())
    return Bound(float(lows.min(initial=0.0)), float(highs.max(initial=0.0)), whole)


def _each_times(values: Any, end: float) -> Any:
    """`times` of many."""
    with np.errstate(invalid="ignore"):
        return np.where(values == 0, 0.0, values * end)


def with_bias(made: Bound, at: Reading, slot: int, factor: float = 1.0) -> Bound:
    if at.input(slot) is None:
        return made
    bias = product(at[slot], Bound(factor, factor))
    return Bound(made.low + bias.low, made.high + bias.high)


def gemm(at: Reading) -> Bound:
    weight, alpha = at.array(1), float(at.attribute("alpha", 1.0))
    if weight is None:
        return UNKNOWN
    made = weighted(at[0], alpha * weight, 1 if at.attribute("transB", 0) else 0)
    return with_bias(made, at, 2, float(at.attribute("beta", 1.0)))


def conv(at: Reading) -> Bound:
    weight = at.array(1)
    if weight is None:
        return UNKNOWN
    return with_bias(weighted(at[0], weight, tuple(range(1, weight.ndim))), at, 2)


def conv_transpose(at: Reading) -> Bound:
    weight = at.array(1)  # [in, out / groups, kernel]
    if weight is None:
        return UNKNOWN
    return with_bias(weighted(at[0], weight, (0, *range(2, weight.ndim))), at, 2)


def einsum(at: Reading) -> Bound:
    equation = at.attribute("equation").replace(" ", "")
    left, _, right = equation.partition("->")
    sizes: dict[str, int | None] = {}
    for slot, labels in enumerate(left.split(",")):
        shape = at.shape(slot)
        if shape is None or "." in labels or len(shape) != len(labels):
            return UNKNOWN
        sizes |= dict(zip(labels, shape, strict=True))
    summed = [size for label, size in sizes.items() if label not in right]
    if "->" not in equation or None in summed:
        return UNKNOWN
    largest = float(math.prod(size or 0 for size in summed))
    for x in at.given():
        largest = times(largest, x.largest)
    return Bound(-largest, largest, all(x.whole for x in at.given()))


def norm_rule(at: Reading) -> Bound:
    """x̂ γ + β with |x̂| ≤ √n for n normalised values."""
    shape = at.shape(0)
    axis = int(at.attribute("axis", -1)) if at.node.op_type == "LayerNormalization" else 2
    if shape is None or None in shape[axis:]:
        return UNKNOWN
    root = math.sqrt(math.prod(size or 0 for size in shape[axis:]))
    return with_bias(product(Bound(-root, root), at[1]), at, 2)


def batch_norm(at: Reading) -> Bound:
    arrays = [at.array(slot) for slot in range(1, 5)]
    if any(value is None for value in arrays):
        return UNKNOWN
    gamma, beta, mean, var = (np.asarray(value, np.float64) for value in arrays)
    factor = gamma / np.sqrt(var + float(at.attribute("epsilon", 1e-5)))
    shift, x = beta - mean * factor, at[0]
    ends = [
        times(float(f), end) + float(s)
        for f, s in zip(factor.ravel(), shift.ravel(), strict=True)
        for end in x[:2]
    ]
    return Bound(min(ends), max(ends))
