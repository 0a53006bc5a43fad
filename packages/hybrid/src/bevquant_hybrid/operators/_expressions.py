"""Limits in the table: expressions over quantities of a call."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from types import CodeType, MappingProxyType

Scalar = int | float | str | bool | None
Value = Scalar | tuple[Scalar, ...]

DTYPES = ("qint8", "qint16", "qint32", "qbool", "float32", "constant")


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator, with all data for the check of its limits."""

    path: str  # the module's path, or the graph node's name
    operator: str  # the name of its row, e.g. "torch.nn.Conv2d", or one of the row's aliases
    # Quantities in the row's limits, e.g. {"kernel_size": (3, 3)}. A number applies to every
    # axis
    attributes: Mapping[str, Value] = field(default_factory=dict)
    input_shapes: tuple[tuple[int, ...], ...] = ()  # one per input tensor; a weight is not an input
    # One per input shape: qint8, qint16, qint32, qbool, float32, or constant for a tensor
    # that does not depend on the model's inputs
    input_dtypes: tuple[str, ...] = ()
    output_shape: tuple[int, ...] = ()  # of the first output
    output_dtype: str = "qint8"  # of the first output
    # Whether its result is a model output, directly or through a dequantize stub
    is_model_output: bool = False
    weight_count: int = 0  # number of weights
    bias_count: int = 0  # number of bias values
    # Paths of the producers of its inputs, "" for an input of the model
    inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse records that contradict themselves."""
        if len(self.input_dtypes) != len(self.input_shapes):
            raise ValueError(
                f"{self.path}: {len(self.input_shapes)} input shapes but "
                f"{len(self.input_dtypes)} input dtypes; give one dtype for each shape"
            )
        for dtype in (*self.input_dtypes, self.output_dtype):
            if dtype not in DTYPES:
                raise ValueError(f"{self.path}: dtype {dtype!r}; expected one of {DTYPES}")
        object.__setattr__(self, "attributes", MappingProxyType(dict(self.attributes)))


BYTES = {"qint8": 1, "qint16": 2, "qint32": 4, "qbool": 1, "float32": 4, "constant": 4}


def _first(call: OperatorCall) -> tuple[int, ...]:
    """Shape of the first input; without inputs, of the output."""
    return call.input_shapes[0] if call.input_shapes else call.output_shape


def axis_names(rank: int) -> str:
    """One letter per axis: NCHW, NCW, NCDHW."""
    return {3: "NCW", 5: "NCDHW"}.get(rank, "NCHW" + "?" * max(0, rank - 4))[:rank]


def _axis(call: OperatorCall, name: str) -> int:
    shape = _first(call)
    names = axis_names(len(shape))
    return shape[names.index(name)] if name in names else 1


def _numbers(call: OperatorCall, name: str) -> tuple[int, ...]:
    """An attribute as integers, whether it is one number or several."""
    value = call.attributes[name]
    values = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(v, int) for v in values):
        raise ValueError(f"{call.path}: {name}={value!r}; expected integers")
    return tuple(int(v) for v in values if v is not None)


def _kernel_axis(call: OperatorCall, axis: int) -> int:
    kernel = _numbers(call, "kernel_size")
    return kernel[axis] if len(kernel) > 1 else kernel[0]


def _channels_per_group(call: OperatorCall) -> int:
    return _numbers(call, "in_channels")[0] // _numbers(call, "groups")[0]


def _filter_size(call: OperatorCall) -> int:
    """C/g·kH·kW, the weights of one filter."""
    kernel = _numbers(call, "kernel_size")
    # One number stands for every axis.
    if len(kernel) == 1:
        kernel *= max(1, len(_first(call)) - 2)
    return _channels_per_group(call) * prod(kernel)


def _accumulator_bound(call: OperatorCall) -> int:
    """The largest sum that can occur: Σ|w| of the worst filter times the largest input."""
    dtype = call.input_dtypes[0] if call.input_dtypes else "qint8"
    largest = 32768 if dtype == "qint16" else 128
    if "weight_l1" in call.attributes:
        return _numbers(call, "weight_l1")[0] * largest
    # Without Σ|w| every weight counts as 128.
    return _filter_size(call) * 128 * largest


def _ungrouped_channels(call: OperatorCall) -> int:
    groups = _numbers(call, "groups")[0]
    return _numbers(call, "in_channels")[0] % groups + _numbers(call, "out_channels")[0] % groups


def _batch_broadcasts(call: OperatorCall) -> bool:
    rank = len(call.output_shape)
    batches = {s[0] if len(s) == rank else 1 for s in call.input_shapes if s}
    return rank > 0 and len(batches) > 1


def _scalar_operands(call: OperatorCall) -> int:
    value = call.attributes.get("scalars", 0)
    return value if isinstance(value, int) else 0


def _repeated_shuffle_indices(call: OperatorCall) -> int:
    indices = call.attributes.get("shuffle_index", ())
    return len(indices) - len(set(indices)) if isinstance(indices, tuple) else 0


def _correlation_room(call: OperatorCall) -> int:
    """min(H, W) + 2·pad − 2·⌊d/s₂⌋·s₂ − K + 1, as the documents write it."""
    names = ("max_displacement", "stride2", "pad_size", "kernel_size")
    reach, step, pad, kernel = (_numbers(call, name)[0] for name in names)
    side = min(_axis(call, "H"), _axis(call, "W"))
    return side + 2 * pad - 2 * (reach // step * step) - kernel + 1


QUANTITIES: dict[str, Callable[[OperatorCall], Value]] = {
    "batch": lambda call: _axis(call, "N"),
    "channels": lambda call: _axis(call, "C"),
    "height": lambda call: _axis(call, "H"),
    "width": lambda call: _axis(call, "W"),
    "sizes": _first,
    "input_rank": lambda call: tuple(
        len(s) for s, d in zip(call.input_shapes, call.input_dtypes, strict=True) if d != "constant"
    ),
    "output_rank": lambda call: len(call.output_shape),
    "input_count": lambda call: len(call.input_shapes),
    "input_bytes": lambda call: tuple(
        prod(s) * BYTES[d] for s, d in zip(call.input_shapes, call.input_dtypes, strict=True)
    ),
    "input_dtype": lambda call: call.input_dtypes[0] if call.input_dtypes else "float32",
    "output_dtype": lambda call: call.output_dtype,
    "is_model_output": lambda call: call.is_model_output,
    "channels_per_group": _channels_per_group,
    "filter_size": _filter_size,
    "kernel_depth": lambda call: _kernel_axis(call, -3),
    "kernel_height": lambda call: _kernel_axis(call, -2),
    "kernel_width": lambda call: _kernel_axis(call, -1),
    "distinct_strides": lambda call: len(set(_numbers(call, "stride"))),
    "accumulator_bound": _accumulator_bound,
    "ungrouped_channels": _ungrouped_channels,
    "broadcast_inputs": lambda call: sum(
        bool(shape) and shape != call.output_shape for shape in call.input_shapes
    ),
    "batch_broadcasts": _batch_broadcasts,
    "scalar_operands": _scalar_operands,
    "constant_operands": lambda call: call.input_dtypes.count("constant") + _scalar_operands(call),
    "reduced_axes": lambda call: call.attributes["reduced_axes"],
    "repeated_shuffle_indices": _repeated_shuffle_indices,
    "correlation_room": _correlation_room,
    "kernel_parity": lambda call: _numbers(call, "kernel_size")[0] % 2,
    "normalized_size": lambda call: prod(_numbers(call, "normalized_shape")),
    "resize": lambda call: tuple(
        out / size for out, size in zip(call.output_shape[2:], _first(call)[2:], strict=True)
    ),
}


_ALLOWED = (
    *(ast.Expression, ast.Compare, ast.Name, ast.Load, ast.Constant, ast.Set, ast.BinOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div),
    *(ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq, ast.In),
)


@dataclass(frozen=True)
class Expression:
    """A parsed comparison.

    >>> within = Expression.parse("1 <= kernel_size <= 7")
    >>> within.names
    ('kernel_size',)
    >>> within.holds_for_all({"kernel_size": (3, 7)}), within.holds_for_all({"kernel_size": 8})
    (True, False)
    """

    text: str
    names: tuple[str, ...]
    _code: CodeType

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Parse ``text``; a ``ValueError`` names what the language does not have."""
        try:
            tree = ast.parse(text, mode="eval")
        except SyntaxError as error:
            raise ValueError(f"limit {text!r} is no expression: {error.msg}") from error
        if not isinstance(tree.body, ast.Compare):
            raise ValueError(f"limit {text!r} is no comparison, such as 'kernel_size <= 7'")
        for node in ast.walk(tree):
            if not isinstance(node, _ALLOWED):
                kind = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
                raise ValueError(f"limit {text!r}: {kind} is not allowed")
        code = compile(tree, text, "eval")
        return cls(text, code.co_names, code)

    def holds_for_all(self, quantities: Mapping[str, Value]) -> bool:
        """Whether the comparison is true of every number of every quantity."""
        return all(self._outcomes(quantities))

    def holds_for_any(self, quantities: Mapping[str, Value]) -> bool:
        """Whether it is true of at least one."""
        return any(self._outcomes(quantities))

    def _outcomes(self, quantities: Mapping[str, Value]) -> list[bool]:
        """For each number of a quantity with its partner of others; one number fits all."""
        given = {name: quantities[name] for name in self.names}
        several = [value for value in given.values() if isinstance(value, tuple)]
        counts = {len(value) for value in several} or {1}
        if len(counts) > 1:
            raise ValueError(f"{self.text!r}: {' and '.join(map(str, several))} differ in length")
        outcomes = []
        for i in range(*counts):
            each = {n: v[i] if isinstance(v, tuple) else v for n, v in given.items()}
            try:
                # `_ALLOWED` has no calls and no attributes: a table cannot run code.
                outcomes.append(bool(eval(self._code, {"__builtins__": {}}, each)))
            except TypeError as error:
                values = " and ".join(map(repr, (*each.values(), *self._code.co_consts)))
                raise ValueError(f"{self.text!r}: cannot be computed of {values}") from error
        return outcomes
