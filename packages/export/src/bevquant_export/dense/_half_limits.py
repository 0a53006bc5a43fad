"""Values that float16 cannot hold or compute: reasons for float32, from bounds."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from bevquant_export.dense._bound import INF, Bound, Reading, times
from bevquant_export.dense._bound_rules import tested
from bevquant_export.dense._bounds import Bounds

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
        return ""
    if np.isinf(bound.largest):
        return UNKNOWN_RANGE
    return f"its values may reach {bound.largest:g}, beyond float16 ({LARGEST_HALF:,.0f})"


def overflow(bounds: Bounds, floats: Collection[str], node: Any) -> str:
    """Reason why a node's values do not fit float16; "" where they do."""
    for slot, name in enumerate(node.input):
        if name not in floats or slot in SINGLE_INPUTS.get(node.op_type, ()):
            continue
        constant = bounds.array(name)
        why = (
            beyond(bounds[name]) if constant is None else _lost(bounds, node, np.asarray(constant))
        )
        if why:
            return f"its input {name}: {why}"
    for name in node.output:
        if name in floats and (why := beyond(bounds[name])):
            return why
    return _inside(bounds, node)


def _lost(bounds: Bounds, node: Any, value: Any) -> str:
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


def _is_replacement(bounds: Bounds, node: Any) -> bool:
    """Whether a constant means infinity, which no value of the bound is."""
    if node.op_type != "Where":
        return False
    kind, bound = tested(bounds, node.input[0])
    return kind == "IsNaN" or (kind == "IsInf" and bound.largest <= LARGEST_HALF)


def _inside(bounds: Bounds, node: Any) -> str:
    """Reason why the sums inside a mean or a norm do not fit float16."""
    norms = ("InstanceNormalization", "LayerNormalization", "GroupNormalization")
    largest = bounds[node.input[0]].largest if node.input else 0.0
    if node.op_type == "ReduceL2":
        inside = bounds.squares(node)
    elif node.op_type in norms:
        epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)
        if epsilon < LEAST:
            return f"its epsilon {epsilon:g} is {float(np.float16(epsilon)):g} in float16"
        inside = (2 * largest) ** 2
    elif node.op_type == "ReduceMean":
        inside = times(Reading(bounds, node).reduced(), largest)
    elif node.op_type == "GlobalAveragePool":
        inside = times(
            math.prod(s or INF for s in (bounds.shapes[node.input[0]] or [])[2:]), largest
        )
    else:
        return ""
    if inside <= LARGEST_HALF:
        return ""
    return f"sums inside may reach {inside:g}, beyond float16 ({LARGEST_HALF:,.0f})"


def argument(bounds: Bounds, node: Any) -> tuple[str, bool]:
    """Reason why an argument needs more digits than float16 has, and whether its producers do."""
    slot = {"Div": 1, "Reciprocal": 0, "Log": 0, "Pow": 0, "Sqrt": 0}.get(node.op_type)
    if node.op_type == "Pow":
        power = bounds.array(node.input[1])
        slot = None if power is not None and (power >= 0).all() else 0
    if slot is not None and bounds.array(node.input[slot]) is None:
        least = bounds[node.input[slot]].least
        if least < LEAST and (least > 0 or node.op_type != "Sqrt"):
            return (
                f"its argument {node.input[slot]} may be as small as {least:g}, of which "
                f"float16 makes {float(np.float16(least)):g}",
                True,
            )
    if node.op_type == "LogSoftmax" and bounds[node.output[0]].low < math.log(LEAST):
        return "engines compute it as the logarithm of a softmax, which may be 0 in float16", False
    return "", False
