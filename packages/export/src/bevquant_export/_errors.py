"""Errors of the exporters. Another exporter that calls one puts its own name first."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

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


def refuse_no_values(given: Mapping[str, Tensor], error: type[CallError]) -> None:
    """Refuse inputs that are all empty: the comparison of a file would cover no value."""
    if given and not any(value.numel() for value in given.values()):
        name, first = next(iter(given.items()))
        raise error(
            f"input {name} of shape {tuple(first.shape)} has no values, with which the file is "
            "compared, and no other input has any; give a frame as in use"
        )


class UnsplitError(ValueError):
    """A model that has no form as a sparse and a dense file, or as one without its decisions.

    Attributes:
        place: Operation, module, file and line.
    """

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place
