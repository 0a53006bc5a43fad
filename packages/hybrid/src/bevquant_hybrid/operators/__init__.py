"""Operators of a BPU and their limits: a table, a check, and a tracer for its input."""

from bevquant_hybrid.operators._attributes import row_of_function, row_of_module
from bevquant_hybrid.operators._expressions import OperatorCall

from ._attributes import tensors_in
from ._expressions import Expression
from ._recorder import Seen, Watch
from ._table import (
    Limit,
    March,
    Operator,
    Support,
    SupportTable,
    build_table,
    is_float,
    is_identity,
    load_support_table,
    render_support_table,
    runs_on_cpu,
)
from ._trace import trace_calls
from ._violations import Advice, Violation, find_advice, find_violations

__all__ = [
    "Advice",
    "Expression",
    "Limit",
    "March",
    "Operator",
    "OperatorCall",
    "Seen",
    "Support",
    "SupportTable",
    "Violation",
    "Watch",
    "build_table",
    "find_advice",
    "find_violations",
    "is_float",
    "is_identity",
    "load_support_table",
    "render_support_table",
    "row_of_function",
    "row_of_module",
    "runs_on_cpu",
    "tensors_in",
    "trace_calls",
]
