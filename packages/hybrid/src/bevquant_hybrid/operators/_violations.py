"""Comparison of calls with the table: all violations, and advice that cannot be checked."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ._expressions import QUANTITIES, OperatorCall, Value
from ._table import Limit, March, Operator, Support, find_row, load_support_table

_ON_CPU = "run it on the CPU: name the module in hybrid_dict"


@dataclass(frozen=True)
class Violation:
    """A condition that a call does not meet."""

    path: str  # the module or node
    operator: str
    march: str
    constraint: str  # the quantities at fault, e.g. kernel_size
    expected: str  # the condition
    actual: str  # the call's value
    remedy: str  # advice for the user

    def __str__(self) -> str:
        """One line for a person."""
        return (
            f"{self.path} ({self.operator}) on {self.march}: {self.constraint} is {self.actual}, "
            f"expected {self.expected}; {self.remedy}"
        )


@dataclass(frozen=True)
class Advice:
    """A remark on a call: precision, or a limit that its record does not cover."""

    path: str
    operator: str
    text: str


def find_violations(calls: Iterable[OperatorCall], march: str) -> list[Violation]:
    """List all violations of ``march``'s limits by ``calls``.

    Args:
        calls: The operators of the BPU part, in order.
        march: Such as ``"bayes"``.

    Raises:
        ValueError: If the march is unknown, or a call lacks an attribute of its row.

    Example:
        >>> pool = OperatorCall(
        ...     "avg_pool", "torch.nn.AvgPool2d",
        ...     {"kernel_size": 8, "stride": 8, "padding": 0},
        ...     input_shapes=((1, 20, 8, 8),), input_dtypes=("qint8",), output_shape=(1, 20, 1, 1),
        ... )
        >>> [violation] = find_violations([pool], "bernoulli2")
        >>> violation.constraint, violation.expected, violation.actual
        ('kernel_size', '1 <= kernel_size <= 7', '8')
        >>> find_violations([pool], "bayes")
        []
    """
    target = load_support_table().march(march)
    return [violation for call in calls for violation in _check_call(call, target)]


def find_advice(calls: Iterable[OperatorCall], march: str) -> list[Advice]:
    """List the table's remarks on ``calls``, and the limits that their records do not cover."""
    target = load_support_table().march(march)
    column = target.column
    advice: list[Advice] = []
    for call in calls:
        row = find_row(call.operator)
        if target.partial and (row is None or column not in row.support):
            text = f"its limits on {target.title} are not in this package; see the public table"
            advice.append(Advice(call.path, call.operator, text))
        if row is None or column not in row.support:
            continue
        advice += [Advice(call.path, row.name, text) for text in row.advice]
        for limit in row.support[column].limits:
            missing = _missing_data(limit, call)
            if missing and (limit.when is None or limit.when.holds_for_any(_quantities(call))):
                text = f"make sure of {limit.text}: {missing} is not known here"
                advice.append(Advice(call.path, row.name, text))
    return advice


def _check_call(call: OperatorCall, march: March) -> Iterator[Violation]:
    table, row = load_support_table(), find_row(call.operator)
    support = row.support.get(march.column) if row is not None else None
    if row is None or support is None:
        if march.partial:
            return
        expected, actual, hint = f"an operator that {march.title} supports", call.operator, ""
        if row is None:
            expected = "an operator of the support table"
            near = difflib.get_close_matches(call.operator, table.operators, n=3)
            hint = f"; names near it: {', '.join(near)}" if near else ""
        else:
            others = [m.title for m in table.marches.values() if m.column in row.support]
            actual = row.name + (f" ({' and '.join(others)} alone)" if others else "")
        name = call.operator if row is None else row.name
        about = call.path, name, march.title, "operator"
        yield Violation(*about, expected, actual, _ON_CPU + hint)
        return
    _check_attributes(call, row)
    yield from _check_dtypes(call, row, support, march)
    quantities = _quantities(call)
    for limit in (*march.limits, *support.limits):
        free = limit.unless_any_rank and row.any_rank
        if free or _missing_data(limit, call):
            continue
        if limit.when is not None and not limit.when.holds_for_any(quantities):
            continue
        if not limit.require.holds_for_all(quantities):
            values = {name: _show(quantities[name]) for name in limit.require.names}
            actual = ", ".join(f"{name}={value}" for name, value in values.items())
            if len(values) == 1:
                (actual,) = values.values()
            about = call.path, row.name, march.title, ", ".join(values)
            yield Violation(*about, limit.text, actual, limit.remedy)


def _check_attributes(call: OperatorCall, row: Operator) -> None:
    missing = [name for name in row.needs if name not in call.attributes]
    if missing:
        raise ValueError(
            f"{call.path}: a call of {row.name} needs the attributes {', '.join(row.needs)}; "
            f"{', '.join(missing)} not given"
        )


def _check_dtypes(
    call: OperatorCall, row: Operator, support: Support, march: March
) -> Iterator[Violation]:
    for index, dtype in enumerate(call.input_dtypes):
        allowed = support.accepted(index)
        if not support.takes(index, dtype):
            remedy = f"change the qconfig of what feeds it to {allowed[0]}"
            if dtype == "float32":
                remedy = "insert a QuantStub before it"
            elif allowed == ("float32",):
                remedy = "leave the stub out: its input is quantized already"
            about = call.path, row.name, march.title, f"dtype of input {index}"
            yield Violation(*about, " or ".join(allowed), dtype, remedy)
    if support.output == "same":
        outputs: tuple[str, ...] = call.input_dtypes[:1]
    else:
        outputs = support.output
    # A wrong input has been reported; that the output follows it is no second fault.
    known = not support.input or call.input_dtypes[:1] == () or call.input_dtypes[0] != "float32"
    if outputs and call.output_dtype not in outputs and (known or support.input == ("float32",)):
        about = call.path, row.name, march.title, "dtype of the output"
        remedy = "change the dtype of its qconfig"
        yield Violation(*about, " or ".join(outputs), call.output_dtype, remedy)


class _Lazy(dict[str, Value]):
    """Quantities of a call, computed where a limit asks for them."""

    def __init__(self, call: OperatorCall) -> None:
        super().__init__(call.attributes)
        self._call = call

    def __missing__(self, name: str) -> Value:
        self[name] = QUANTITIES[name](self._call)
        return self[name]


def _quantities(call: OperatorCall) -> Mapping[str, Value]:
    return _Lazy(call)


def _missing_data(limit: Limit, call: OperatorCall) -> str:
    """The attribute that ``limit`` asks for and ``call`` lacks, or ``""``."""
    if not limit.needs_data:
        return ""
    return next(
        (n for n in limit.require.names if n not in call.attributes and n not in QUANTITIES), ""
    )


def _show(value: Value) -> str:
    if isinstance(value, tuple) and len(set(value)) == 1:  # the same on every axis
        value = value[0]
    return repr(value) if isinstance(value, str) else str(value)
