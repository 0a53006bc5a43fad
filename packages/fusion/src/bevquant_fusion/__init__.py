"""Fold batch normalisation into dense and sparse convolutions, found by data flow."""

from ._errors import UntraceableError
from ._rebuild import rebuild_forward
from ._trace_forward import trace_forward

__all__ = ["UntraceableError", "rebuild_forward", "trace_forward"]
