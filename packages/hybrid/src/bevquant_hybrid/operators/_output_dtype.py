"""Which dtype the result of a call has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ._call import DTYPES
from ._table import Operator

__all__ = ["output_dtype"]


def output_dtype(
    operator: str,
    row: Operator | None,
    module: nn.Module | None,
    inputs: Sequence[str],
    output: Any,
) -> str:
    """What the output says itself, else what its operator or module fixes, else its input's.

    Args:
        operator: Name of the operator.
        row: Its row, where it has one.
        module: The module that was called, if it was one.
        inputs: Dtypes of its inputs.
        output: The first tensor that it returned.
    """
    told = getattr(output, "dtype", None)
    if isinstance(told, str) and told in DTYPES:  # a quantized tensor knows its own
        return str(told)
    if operator.endswith(".QuantStub"):
        return _observed(module) or "qint8"
    supports = row.support.values() if row else ()
    fixed = {s.output for s in supports if s.output != "same"}
    only = next(iter(fixed)) if len(fixed) == 1 else ()
    if len(only) == 1 and only[0] in ("float32", "qbool", "qint32"):
        return only[0]
    source = next((dtype for dtype in inputs if dtype != "constant"), "float32")
    if source == "float32":
        return source
    qconfig = getattr(module, "qconfig", None)
    if qconfig is not None and getattr(qconfig, "activation", 0) is None:
        # No activation: the accumulator itself leaves, where the operator has one.
        return "qint32" if any("qint32" in outputs for outputs in fixed) else source
    return _observed(module) or source


def _observed(module: nn.Module | None) -> str:
    """The dtype of what a module's own fake-quantize makes, or ``""``."""
    for holder in (getattr(module, "activation_post_process", None), module):
        dtype = getattr(holder, "dtype", None)
        if isinstance(dtype, str) and dtype in DTYPES:
            return str(dtype)
    return ""
