r"""Reasons for float32 in a file of float16: values and digits that float16 does not have.

A value's bounds say whether float16 holds it. The sizes of tensors say whether an operation keeps
enough digits: float16 rounds an operand x by up to u·|x|, u = 2⁻¹¹. An operation is float32, with
the producers of its operands, where this changes its result by more than 2⁻⁷ of the result's
largest value:

.. math:: u \max(|a|, |b|) > 2^{-7} |a \pm b|, \quad u > 2^{-7} |\log a|, \quad
          u |a| > 2^{-7} b \text{ of } a \bmod b

(differences of large coordinates, E[x²] − E[x]², log(1 + x), 1 − (1 − x)), or by more than the
absolute limit: 2⁻⁷ rad for a sine, 2⁻⁴ cells for a cell number, 2⁻⁴ pixels for a sampling grid, 2⁻⁵
for a softmax's argument. Operands count with their largest value of all frames, results with the
smallest of the frames' largest values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from bevquant_export.half._bounds import Bounds, tested
from bevquant_export.half._intervals import INF, RENAMED, Bound, Reading, shape_of, times
from bevquant_export.lint._model import PLUGINS, TRT

if TYPE_CHECKING:
    import onnx_ir as ir

FLOAT = 1  # TensorProto's number

LARGEST_HALF = 65504.0
LARGEST_WHOLE = 2048.0
LEAST = 2.0**-17  # below it float16, whose step is 2⁻²⁴, is off by more than 2⁻⁸ of the value
# Inputs that are float32 whatever the data are.
SINGLE_INPUTS = {"Resize": (1, 2), "Upsample": (1,)}
UNKNOWN_RANGE = "its range is not known"


def beyond(bound: Bound) -> str:
    """Reason why values of this bound do not fit float16; "" where they do."""
    if bound.largest <= LARGEST_HALF:
        if bound.whole and bound.largest > LARGEST_WHOLE:
            return f"whole numbers to {bound.largest:g}: float16 has all of them to 2,048"
        if 0 < bound.largest < LEAST:
            return f"its values end at {bound.largest:g}, where the step of float16 is 6e-8"
        return ""
    if np.isinf(bound.largest):
        return UNKNOWN_RANGE
    return f"its values may reach {bound.largest:g}, beyond float16 ({LARGEST_HALF:,.0f})"


def overflow(bounds: Bounds, node: ir.Node) -> str:
    """Reason why a node's values do not fit float16; "" where they do."""
    for slot, value in enumerate(node.inputs):
        if not is_single(value) or slot in SINGLE_INPUTS.get(node.op_type, ()):
            continue
        constant = bounds.array(value)
        why = (
            beyond(bounds[value]) if constant is None else _lost(bounds, node, np.asarray(constant))
        )
        if why:
            return f"its input {value.name}: {why}"
    for value in node.outputs:
        if is_single(value) and (why := beyond(bounds[value])):
            return why
    return _inside(bounds, node)


def _lost(bounds: Bounds, node: ir.Node, value: Any) -> str:
    """Reason why a constant does not fit float16."""
    finite = np.abs(value[np.isfinite(value)]).astype(np.float64)
    if not finite.any():
        return ""
    largest = float(finite.max())
    if largest > LARGEST_HALF:
        if node.op_type in ("Clip", "Min", "Max") or _is_replacement(bounds, node):
            return ""  # ±65,504 has the same effect on values of float16
        return f"the constant {largest:g} is beyond float16 ({LARGEST_HALF:,.0f})"
    if largest < LEAST:
        return f"the constant {largest:g} is {float(np.float16(largest)):g} in float16"
    exact = (value.astype(np.float16).astype(value.dtype) == value)[np.isfinite(value)].all()
    if not exact and largest > LARGEST_WHOLE and (finite == finite.round()).all():
        return beyond(Bound(-largest, largest, True))
    return ""


def _is_replacement(bounds: Bounds, node: ir.Node) -> bool:
    """Whether a constant means infinity, which no value of the bound is."""
    if node.op_type != "Where":
        return False
    kind, bound = tested(bounds, node.inputs[0])
    return kind == "IsNaN" or (kind == "IsInf" and bound.largest <= LARGEST_HALF)


def _inside(bounds: Bounds, node: ir.Node) -> str:
    """Reason why the sums inside a mean or a norm do not fit float16."""
    norms = ("InstanceNormalization", "LayerNormalization", "GroupNormalization")
    largest = bounds[node.inputs[0]].largest if node.inputs else 0.0
    if node.op_type == "ReduceL2":
        inside = bounds.squares(node)
    elif node.op_type in norms:
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        if epsilon < LEAST:
            return f"its epsilon {epsilon:g} is {float(np.float16(epsilon)):g} in float16"
        inside = (2 * largest) ** 2
    elif node.op_type == "ReduceMean":
        inside = times(Reading(bounds, node).reduced(), largest)
    elif node.op_type == "GlobalAveragePool":
        sizes = shape_of(node.inputs[0]) or []
        inside = times(math.prod(size or INF for size in sizes[2:]), largest)
    else:
        return ""
    if inside <= LARGEST_HALF:
        return ""
    return f"sums inside may reach {inside:g}, beyond float16 ({LARGEST_HALF:,.0f})"


def argument(bounds: Bounds, node: ir.Node) -> tuple[str, bool]:
    """Reason why an argument needs more digits than float16 has, and whether its producers do."""
    slot = {"Div": 1, "Reciprocal": 0, "Log": 0, "Pow": 0, "Sqrt": 0}.get(node.op_type)
    if node.op_type == "Pow":
        power = bounds.array(node.inputs[1])
        slot = None if power is not None and (power >= 0).all() else 0
    value = None if slot is None else node.inputs[slot]
    if value is not None and bounds.array(value) is None:
        least = bounds[value].least
        if least < LEAST and (least > 0 or node.op_type != "Sqrt"):
            return (
                f"its argument {value.name} may be as small as {least:g}, which "
                f"float16 rounds to {float(np.float16(least)):g}",
                True,
            )
    if node.op_type == "LogSoftmax" and bounds[node.outputs[0]].low < math.log(LEAST):
        return "engines compute it as the logarithm of a softmax, which may be 0 in float16", False
    return "", False


def is_single(value: ir.Value | None) -> TypeGuard[ir.Value]:
    """Whether a tensor is float32, constants included."""
    return value is not None and value.dtype == FLOAT


def takes_halves(node: ir.Node, opset: int) -> bool:
    """Whether the operator set has float16 for a node's floats."""
    from onnx import defs

    if node.domain in (PLUGINS, TRT):
        return False  # positions have the type of the values; FP4 belongs to pairs
    if node.op_type == "Constant" or node.domain:
        return True
    schema = defs.get_schema(node.op_type, opset, "")
    types = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    ports = [*zip(node.inputs, schema.inputs, strict=False)]
    ports += zip(node.outputs, schema.outputs, strict=False)
    return all(
        "tensor(float16)" in types.get(port.type_str, ["tensor(float16)"])
        for value, port in ports
        if is_single(value)
    )


_MASK, _BESIDE_MASK = -32768.0, 16384.0


def lower_masks(graph: ir.Graph, bounds: Bounds) -> bool:
    """Replace large negative numbers by −32,768, which has the same softmax; return whether any.

    Unmasked values are at most 16,384, so that a masked one is 0 after the softmax.
    """
    import onnx_ir as ir

    found = False
    for value in filter(is_single, graph.initializers.values()):
        array = bounds.array(value)
        large = np.isfinite(array) & (array <= -LARGEST_HALF)
        others = np.abs(array[~large & np.isfinite(array)]).max(initial=0.0)
        if not large.any() or others > _BESIDE_MASK:
            continue
        if value.uses() and all(_is_mask(bounds, node, value) for node in value.consumers()):
            value.const_value = ir.tensor(
                np.where(large, np.float32(_MASK), array), name=value.name
            )
            found = True
    return found


def _is_mask(bounds: Bounds, node: ir.Node, mask: ir.Value) -> bool:
    if node.op_type not in ("Add", "Where") or not _is_softmax_only(node.outputs[0]):
        return False
    others = [value for value in node.inputs if value is not mask and is_single(value)]
    return all(bounds[value].largest <= _BESIDE_MASK for value in others)


def _is_softmax_only(value: ir.Value) -> bool:
    return bool(value.uses()) and all(
        node.op_type == "Softmax" or (node.op_type in RENAMED and _is_softmax_only(node.outputs[0]))
        for node in value.consumers()
    )


_UNIT, _SHARE = 2.0**-11, 2.0**-7
_ANGLE, _CELLS, _PIXELS, _LOGITS = 16.0, 128.0, 256, 128.0
_TINY = 2.0**-12  # below 2⁻¹⁴ digits are lost, and most values are smaller than the largest
FEW_TERMS = 8  # a product with a matrix of coordinates


class Size(NamedTuple):
    """Magnitudes of a tensor in several frames."""

    # Largest magnitude of all frames.
    largest: float
    # Smallest of the frames' largest magnitudes, without zeros.
    least: float
    # Largest value of all frames.
    high: float
    # Whether all values are whole numbers.
    whole: bool = True
    # Whether all values are finite; infinite ones mark places and are ignored above.
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


def few_digits(bounds: Bounds, sizes: Mapping[str, Size], node: ir.Node) -> str:
    """Reason why a node's result has too few digits in float16; "" where it has enough."""
    kind, made = node.op_type, sizes.get(node.outputs[0].name or "")
    largest = bounds[node.inputs[0]].largest if node.inputs else 0.0
    if kind in ("Sin", "Cos", "Tan") and largest > _ANGLE:
        return f"its argument may reach {largest:g}, where float16 has no angles"
    if kind in ("Floor", "Ceil", "Round") and largest > _CELLS:
        return f"its argument may reach {largest:g}, where float16 is off by {largest * _UNIT:.2g}"
    if kind == "Mod" and largest * _UNIT > _SHARE * bounds[node.inputs[1]].least:
        return f"its argument may reach {largest:g}, and float16 loses the remainder"
    if kind == "GridSample":
        shape = shape_of(node.inputs[0]) or [None]
        if None in shape or max(s or 0 for s in shape[2:]) > _PIXELS:
            return f"places on a map of {shape[2:]}: float16 loses parts of a pixel"
    if made is None:
        return ""
    if 0 < made.largest < _TINY:
        return f"its values reach {made.largest:g}: float16, whose step is 6e-08, has few digits"
    given = [_size(bounds, sizes, value) for value in node.inputs]
    if kind in ("Softmax", "LogSoftmax") and given[0].high > _LOGITS:
        return f"its argument reaches {given[0].high:g}, where float16 is off by some percent"
    lost = _lost_digits(bounds, node, given)
    if lost * _UNIT > _SHARE * made.least > 0:
        return f"terms as large as {lost:g} leave {made.least:g}, with few digits in float16"
    return ""


def _lost_digits(bounds: Bounds, node: ir.Node, given: list[Size]) -> float:
    """Largest term of a sum; 1 for a logarithm; 0 for operations that lose no digits."""
    if node.op_type in ("Add", "Sub", "Sum"):
        return max(size.largest for size in given)
    if node.op_type == "Log":
        return 1.0
    if node.op_type in ("MatMul", "Gemm") and is_small(bounds, node):
        return given[0].largest * given[1].largest
    return 0.0


def is_small(bounds: Bounds, node: ir.Node) -> bool:
    """Whether a product has few terms, as for coordinates."""
    shape = Reading(bounds, node).shape(1)
    if shape is None or len(shape) < 2 or None in shape[-2:]:
        return False
    return min(size or 0 for size in shape[-2:]) <= FEW_TERMS


def _size(bounds: Bounds, sizes: Mapping[str, Size], value: ir.Value | None) -> Size:
    if value is not None and (found := sizes.get(value.name or "")):
        return found
    array = bounds.array(value)
    return Size(0.0, 0.0, 0.0) if array is None or array.dtype.kind not in "fiu" else size_of(array)
