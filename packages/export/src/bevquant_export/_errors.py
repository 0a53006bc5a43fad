"""Errors of the exporters. Another exporter that calls one puts its own name first."""

from __future__ import annotations

from bevquant_graph import CallError


class QdqError(CallError):
    """A model that `export_qdq_onnx` cannot write.

    Attributes:
        located: Whether the problem names file and line.
    """

    function = "export_qdq_onnx"

    def __init__(self, problem: str, *, located: bool = False) -> None:
        super().__init__(problem)
        self.located = located


class FloatFileError(CallError):
    """A module that `export_float_onnx` cannot write."""

    function = "export_float_onnx"


class UnsplitError(ValueError):
    """A model that has no form as a sparse and a dense file, or as one without its decisions.

    Attributes:
        place: Operation, module, file and line.
    """

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place
