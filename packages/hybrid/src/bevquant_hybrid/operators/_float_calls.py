"""Which calls compute on floats, and which a CPU runs: those are no work for a BPU."""

from __future__ import annotations

from ._call import OperatorCall
from ._table import load_support_table

__all__ = ["is_float", "runs_on_cpu"]


def is_float(call: OperatorCall) -> bool:
    """Whether a call computes on floats; boxes beside quantized maps, say, may be floats."""
    if call.operator.endswith("Stub") or "float32" not in call.input_dtypes:
        return False
    row = load_support_table().find(call.operator)
    columns = row.support.values() if row else ()
    if call.input_dtypes[0] == "float32":  # views take any dtype, wherever their input is
        return not any("float32" in column.input for column in columns)
    return any(
        dtype == "float32" and not any(column.takes(index, dtype) for column in columns)
        for index, dtype in enumerate(call.input_dtypes)
    )


def runs_on_cpu(call: OperatorCall) -> bool:
    """Whether a call computes on floats, or is one that the documents give to the CPU."""
    row = load_support_table().find(call.operator)
    return is_float(call) or (row is not None and row.on_cpu)
