"""Symbolic tracing of forwards, for callers that do not read `bevquant_graph` yet."""

from ._dataflow import Call, DataFlow, trace_dataflow
from ._errors import UntraceableError
from ._rebuild import rebuild_forward
from ._trace_forward import trace_forward

__all__ = [
    "Call",
    "DataFlow",
    "UntraceableError",
    "rebuild_forward",
    "trace_dataflow",
    "trace_forward",
]
