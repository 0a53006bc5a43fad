r"""Operations whose result has too few digits in float16, from the sizes of their tensors.

float16 rounds an operand x by up to u·|x|, u = 2⁻¹¹. An operation is float32, with the producers of
its operands, where this changes its result by more than 2⁻⁷ of the result's largest value:

.. math:: u \max(|a|, |b|) > 2^{-7} |a \pm b|, \quad u > 2^{-7} |\log a|, \quad
          u |a| > 2^{-7} b \text{ of } a \bmod b

(differences of large coordinates, E[x²] − E[x]², log(1 + x), 1 − (1 − x)), or by more than the
absolute limit: 2⁻⁷ rad for a sine, 2⁻⁴ cells for a cell number, 2⁻⁴ pixels for a sampling grid, 2⁻⁵
for a softmax's argument. Operands count with their largest value of all frames, results with the
smallest of the frames' largest values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from bevquant_export.dense._bounds import Bounds

_UNIT, _SHARE = 2.0**-11, 2.0**-7
_ANGLE, _CELLS, _PIXELS, _LOGITS = 16.0, 128.0, 256, 128.0
_TINY = 2.0**-12  # below 2⁻¹⁴ digits are lost, and most values are smaller than the largest
FEW_TERMS = 8  # a product with a matrix of coordinates


class Size(NamedTuple):
    """Magnitudes of a tensor in several frames.

    Attributes:
        largest: Largest magnitude of all frames.
        least: Smallest of the frames' largest magnitudes, without zeros.
        high: Largest value of all frames.
        whole: Whether all values are whole numbers.
        finite: Whether all values are finite; infinite ones mark places and are ignored above.
    """

    largest: float
    least: float
    high: float
    whole: bool = True
    finite: bool = True

    def joined(self, other: Size | None) -> Size:
        """Size over the frames of both."""
        if other is None:
            return self
        least = min(v for v in (self.least, other.least) if v) if self.least + other.least else 0.0
        return Size(
            max(self.largest, other.largest), least, max(self.high, other.high),
            self.whole and other.whole, self.finite and other.finite,
        )  # fmt: skip


def size_of(values: Any) -> Size:
    """Size in one frame."""
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    if not finite.size:
        return Size(0.0, 0.0, 0.0, finite=not values.size)
    low, high = float(finite.min()), float(finite.max())
    whole = values.dtype.kind != "f" or bool((finite == np.round(finite)).all())
    return Size(max(-low, high), max(-low, high), high, whole, finite.size == values.size)


def few_digits(bounds: Bounds, sizes: Mapping[str, Size], node: Any) -> str:
    """Reason why a node's result has too few digits in float16; "" where it has enough."""
    kind, made = node.op_type, sizes.get(node.output[0])
    if kind in ("Sin", "Cos", "Tan") and bounds[node.input[0]].largest > _ANGLE:
        largest = bounds[node.input[0]].largest
        return f"its argument may reach {largest:g}, where float16 has no angles"
    if kind in ("Floor", "Ceil", "Round") and bounds[node.input[0]].largest > _CELLS:
        largest = bounds[node.input[0]].largest
        return f"its argument may reach {largest:g}, where float16 is off by {largest * _UNIT:.2g}"
    if kind == "Mod":
        largest, least = bounds[node.input[0]].largest, bounds[node.input[1]].least
        if largest * _UNIT > _SHARE * least:
            return f"its argument may reach {largest:g}, of which float16 loses the remainder"
    if kind == "GridSample":
        shape = bounds.shapes.get(node.input[0]) or [None]
        if None in shape or max(s or 0 for s in shape[2:]) > _PIXELS:
            return f"places on a map of {shape[2:]}: float16 loses parts of a pixel"
    if made is None:
        return ""
    if 0 < made.largest < _TINY:
        return f"its values reach {made.largest:g}: float16, whose step is 6e-08, has few digits"
    given = [_size(bounds, sizes, name) for name in node.input]
    if kind in ("Softmax", "LogSoftmax") and given[0].high > _LOGITS:
        return f"its argument reaches {given[0].high:g}, where float16 is off by some percent"
    lost = _lost(bounds, node, given)
    if lost * _UNIT > _SHARE * made.least > 0:
        return f"terms as large as {lost:g} leave {made.least:g}, of which float16 has few digits"
    return ""


def _lost(bounds: Bounds, node: Any, given: list[Size]) -> float:
    """Largest term of a sum; 1 for a logarithm; 0 for operations that lose no digits."""
    if node.op_type in ("Add", "Sub", "Sum"):
        return max(size.largest for size in given)
    if node.op_type == "Log":
        return 1.0
    if node.op_type in ("MatMul", "Gemm") and is_small(bounds, node):
        return given[0].largest * given[1].largest
    return 0.0


def is_small(bounds: Bounds, node: Any) -> bool:
    """Whether a product has few terms, as for coordinates."""
    weight = bounds.array(node.input[1])
    shape = bounds.shapes.get(node.input[1]) if weight is None else list(weight.shape)
    if shape is None or len(shape) < 2 or None in shape[-2:]:
        return False
    return min(size or 0 for size in shape[-2:]) <= FEW_TERMS


def _size(bounds: Bounds, sizes: Mapping[str, Size], name: str) -> Size:
    if name in sizes:
        return sizes[name]
    value = bounds.array(name) if name else None
    return Size(0.0, 0.0, 0.0) if value is None or value.dtype.kind not in "fiu" else size_of(value)
