"""Differences of a written file from its model, tensor by tensor, and the verdict on each.

The exporters refuse files by it, and pages explain differences with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from bevquant_qnn import gap

# What is computed again, value by value: no difference but ties.
_RECOMPUTED = frozenset(
    "conv conv_transpose linear add requantize resize max_pool move relu constant".split()
)
# Share of the other values that may be a step off, and a few in any case.
_SHARES = {"quantize": 1e-6}
_OTHERS, _FEW = 1e-4, 4
_EXACT = frozenset("max_pool layout relu constant".split())
_FLOAT, _BEHIND = 1e-3, 0.1  # of the largest value: of float32 sums, and behind differing integers
_SHARE, _STEPS = 0.01, 3  # of int8 behind such sums
_OPS = {"conv": "sparse_conv", "relu": "add"}


@dataclass(frozen=True)
class TensorDifference:
    """Difference between a file and the model that it was written from, for one tensor.

    Attributes:
        path: Module that computes it; "" for results.
        op: Operation of a QDQ file, as in an `IntegerModel`; "" for others.
        tensor: Name in the file: of the tensor, of a sparse file's node, or of the output.
        elements: Number of values.
        different: Number of values that differ. For outputs of float functions in sparse files,
            values that differ by more than 2⁻¹⁸ of `size` (the last bits of exp depend on the
            runtime).
        largest: Largest difference: steps for integers, value for floats.
        ties: Differing values that are one step off because the real value is as close to the
            middle of two steps as float rounding reaches. The real value is computed separately, in
            integers and float64. In int8 also values of another row, downstream of a choice between
            scores that float rounding swaps.
        form: ``"int8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"`` or ``"float"``.
        size: Largest magnitude of the model's tensor; 0 where it was not noted.
        behind_functions: Whether a layer reads, directly or through one other layer, a float
            function between layers. Runtimes sum in different orders there, so a value between two
            integers may be rounded to either.
    """

    path: str
    op: str
    tensor: str
    elements: int
    different: int
    largest: float
    ties: int = 0
    form: str = "int8"
    size: float = 0.0
    behind_functions: bool = False

    @property
    def node(self) -> str:
        """`tensor`, for sparse files."""
        return self.tensor

    @property
    def name(self) -> str:
        """`tensor`, for outputs of float files."""
        return self.tensor

    @property
    def relative(self) -> float:
        """`largest` divided by `size`; infinite for a difference from zeros."""
        if not self.largest:
            return 0.0
        return self.largest / self.size if self.size else float("inf")

    @property
    def unexplained(self) -> int:
        """Number of differing values that are no ties."""
        return self.different - self.ties

    @property
    def allowed(self) -> int:
        """Number of unexplained values that float32 rounding may cause.

        None where the operation was computed again. Else, for averages and float functions: four
        values or one in 10,000 (one in a million for a quantized input).
        """
        if self.op in _RECOMPUTED:
            return 0
        return max(_FEW, int(_SHARES.get(self.op, _OTHERS) * self.elements))

    @property
    def is_wrong(self) -> bool:
        """Whether a QDQ file computes other values than the integer model."""
        return self.unexplained > 0 and (self.unexplained > self.allowed or self.largest > 1)


LayerDifference = TensorDifference  # the former names
FloatDifference = TensorDifference


def difference(
    tensor: str,
    made: Tensor,
    wanted: Tensor,
    *,
    path: str = "",
    form: str = "float",
    slack: float = 0.0,
) -> TensorDifference:
    """Compare a tensor of a file with the model's, of one shape.

    `slack` is the allowed difference, as a share of the largest magnitude of `wanted`.
    """
    different, largest, size = gap(wanted, made, slack)
    return TensorDifference(path, "", tensor, made.numel(), different, largest, 0, form, size)


def verdict(verified: str, rows: Iterable[TensorDifference]) -> str:
    """The verification in words: the runtime and the number of differences."""
    rows = list(rows)
    if verified == "no":
        return "not run: whether it computes what the model computes is unknown"
    different = sum(row.different for row in rows)
    float8 = any(row.form.startswith(("fp8", "mxfp8", "nvfp4")) for row in rows)
    kind = "quantized values" if float8 else "integers"
    text = f"{different:,} of {sum(row.elements for row in rows):,} {kind} are not the model's"
    if different:
        largest = max(row.largest for row in rows)
        text += f", at most {largest:g} step{'s' * (largest != 1)} off"
    ties = sum(row.ties for row in rows)
    text += f"; {ties:,} lie between the two" if ties else ""
    text += "; an engine that sums FP8 products in another order may round others" if float8 else ""
    return f"run by {verified}: {text}"


@dataclass(frozen=True)
class TensorCheck:
    """Verdict on one tensor of a file, compared with the model that the file was written from.

    Attributes:
        path: Module that computes it, or its node; empty for a quantized input.
        op: Operation.
        form: ``"int8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``, ``"float"``, or ``"float16"`` for
            arithmetic that both sides share.
        elements: Number of values.
        different: Number of differing values; None for floats.
        largest: Largest difference: steps for int8 and FP8, value for float16, relative to the
            largest value for float.
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
    differences: Iterable[TensorDifference], *, same_arithmetic: bool = False
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
    checks = []
    floats_differ = integers_differ = False
    for row in differences:
        if row.op:
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
        row.path, row.op, row.form, row.elements, row.different, float(row.largest), allowed,
        not row.is_wrong, row.ties,
    )  # fmt: skip


def _sparse(row: TensorDifference, floats_differ: bool, integers_differ: bool) -> TensorCheck:
    if row.form == "int8":
        most, steps = (_SHARE * row.elements, _STEPS) if floats_differ else (0, 0)
        allowed = f"{_STEPS} steps on {100 * _SHARE:g} % of the values" if most else "nothing"
        right = row.different <= most and row.largest <= steps
        return _layer(row, row.form, row.largest, allowed, right)
    share = _BEHIND if integers_differ else _FLOAT
    allowed, right = f"{share:g} of the largest value", row.largest <= share * row.size
    return _layer(row, row.form, row.largest / (row.size or 1.0), allowed, right)


def _layer(
    row: TensorDifference, form: str, largest: float, allowed: str, right: bool, op: str = ""
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
