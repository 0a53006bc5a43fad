"""An interval of numbers, and the inputs of an operator's bound rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

INF = math.inf
RENAMED = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"}
# What hands on some of its input's values.


class Bound(NamedTuple):
    """An interval.

    Attributes:
        low: No value is less.
        high: No value is more.
        whole: Whether every value is a whole number.
    """

    low: float
    high: float
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

    def __init__(self, bounds: Any, node: Any) -> None:
        self.bounds, self.node = bounds, node

    def __getitem__(self, slot: int) -> Bound:
        found: Bound = self.bounds[self.node.input[slot]]
        return found

    def given(self) -> list[Bound]:
        """Bounds of all inputs."""
        return [self.bounds[name] for name in self.node.input if name]

    def array(self, slot: int) -> Any:
        """Values of a constant input; None for another input, or a missing one."""
        names = self.node.input
        return self.bounds.array(names[slot]) if slot < len(names) and names[slot] else None

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute of the node."""
        from onnx import helper

        found = [a for a in self.node.attribute if a.name == name]
        return helper.get_attribute_value(found[0]) if found else default

    def shape(self, slot: int) -> list[int | None] | None:
        """Shape of an input; None where unknown."""
        name = self.node.input[slot]
        value = self.bounds.array(name)
        return list(value.shape) if value is not None else self.bounds.shapes.get(name)

    def is_last(self) -> bool:
        """Whether the node works along the last axis."""
        axis, shape = int(self.attribute("axis", -1)), self.shape(0)
        return axis == -1 or (shape is not None and axis == len(shape) - 1)

    def reduced(self) -> float:
        """Number of values that a reduction combines; infinite where a size is free."""
        shape, axes = self.shape(0), self.attribute("axes")
        if axes is None and len(self.node.input) > 1 and self.node.input[1]:
            axes = self.array(1)
            if axes is None:
                return INF
        if shape is None:
            return INF
        sizes = shape if axes is None else [shape[int(axis)] for axis in axes]
        return INF if None in sizes else float(math.prod(size or 0 for size in sizes))


Rule = Callable[[Reading], Bound]
