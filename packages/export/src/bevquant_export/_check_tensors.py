"""Verdict on each tensor of a written file: the allowed difference, and whether it is exceeded.

The exporters refuse files by it, and pages explain differences with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bevquant_export.dense._written import TensorDifference
    from bevquant_export.sparse._compare import LayerDifference

_EXACT = frozenset("max_pool move relu constant".split())
_FLOAT, _BEHIND = 1e-3, 0.1  # of the largest value: of float32 sums, and behind differing integers
_SHARE, _STEPS = 0.01, 3  # of int8 behind such sums
_OPS = {"conv": "sparse_conv", "relu": "add"}


@dataclass(frozen=True)
class TensorCheck:
    """Verdict on one tensor of a file, compared with the model that the file was written from.

    Attributes:
        path: Module that computes it, or its node; empty for a quantized input.
        op: Operation.
        form: ``"int8"``, ``"float"``, or ``"float16"`` for arithmetic that both sides share.
        elements: Number of values.
        different: Number of differing values; None for floats.
        largest: Largest difference: steps for int8, value for float16, relative to the largest
            value for float.
        allowed: Allowed difference, in words.
        is_right: Whether the difference is within `allowed`.
        ties: Differing values that are ties between two steps, see `TensorDifference`.
    """

    path: str
    op: str
    form: str
    elements: int
    different: int | None
    largest: float
    allowed: str
    is_right: bool
    ties: int = 0


def check_tensors(
    differences: Iterable[TensorDifference | LayerDifference], *, same_arithmetic: bool = False
) -> tuple[TensorCheck, ...]:
    """Judge the differences of a file, such as ``QdqFile.differences``.

    Dense files: ties may differ by one step. Downstream of averages and float functions, a small
    share of values may too (`TensorDifference.allowed`).

    Sparse files: integers are equal up to the first float function or float layer whose sums differ
    (by at most 1/1000 of its largest value). Downstream of these, 1 % of the values may differ by
    up to 3 steps, and floats by a tenth of the largest value.

    Args:
        differences: Differences in the order of the file.
        same_arithmetic: Whether both sides run the same operations in the same order, as for
            Autoware's plugin. No value may differ then.

    Returns:
        One verdict per difference.

    Example:
        >>> from bevquant_export import TensorDifference, check_tensors
        >>> rows = [TensorDifference("neck.0", "conv", "y", 1000, different=3, largest=1, ties=n)
        ...         for n in (3, 2)]
        >>> [(check.is_right, check.allowed) for check in check_tensors(rows)]
        [(True, 'one step on the border of two'), (False, 'one step on the border of two')]
    """
    from bevquant_export.dense._written import TensorDifference  # whose package asks this module

    checks = []
    floats_differ = integers_differ = False
    for row in differences:
        if isinstance(row, TensorDifference):
            checks.append(_dense(row))
        elif same_arithmetic:
            op = "output" if row.node == "output" else "sparse_conv"
            checks.append(_layer(row, "float16", row.largest, "nothing", row.different == 0, op))
        else:
            floats = floats_differ or row.behind_functions
            checks.append(_sparse(row, floats, integers_differ))
            floats_differ |= row.form != "int8" and row.different > 0
            integers_differ |= row.form == "int8" and row.different > 0
    return tuple(checks)


def _dense(row: TensorDifference) -> TensorCheck:
    allowed = "nothing" if row.op in _EXACT else "one step on the border of two"
    if row.allowed:
        allowed += f", and on {row.allowed:,} values"
    return TensorCheck(
        row.path, row.op, "int8", row.elements, row.different, float(row.largest), allowed,
        not row.is_wrong, row.ties,
    )  # fmt: skip


def _sparse(row: LayerDifference, floats_differ: bool, integers_differ: bool) -> TensorCheck:
    if row.form == "int8":
        most, steps = (_SHARE * row.elements, _STEPS) if floats_differ else (0, 0)
        allowed = f"{_STEPS} steps on {100 * _SHARE:g} % of the values" if most else "nothing"
        right = row.different <= most and row.largest <= steps
        return _layer(row, row.form, row.largest, allowed, right)
    share = _BEHIND if integers_differ else _FLOAT
    allowed, right = f"{share:g} of the largest value", row.largest <= share * row.size
    return _layer(row, row.form, row.largest / (row.size or 1.0), allowed, right)


def _layer(
    row: LayerDifference, form: str, largest: float, allowed: str, right: bool, op: str = ""
) -> TensorCheck:
    return TensorCheck(
        row.path or row.node,
        op or _OPS.get(row.node.rstrip("0123456789"), row.node),
        form,
        row.elements,
        None if form == "float" else row.different,
        float(largest),
        allowed,
        right,
    )
