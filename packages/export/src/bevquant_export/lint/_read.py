"""Read a file that may be anything, in memory bounded by its size."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from bevquant_export.lint._rule import Finding, Rule
from bevquant_export.lint._wire import wire_problem
from bevquant_quantizers.documents import read_content

if TYPE_CHECKING:
    import onnx

__all__ = ["EMPTY", "UNREADABLE", "load_model", "read_model"]

_MOST_BYTES = 2**31 - 1

UNREADABLE = Rule(
    "ONX001",
    "error",
    "the file is one complete ModelProto: below 2 GiB, below 500,000 fields, below 100 levels",
    "write the file again; if it came over a network or from Git LFS, fetch it again",
)
EMPTY = Rule(
    "ONX002",
    "error",
    "the model has a graph with at least one node",
    "look whether this is the file that was meant, and export again",
)


def read_model(path: Path) -> onnx.ModelProto | Finding:
    """Read a model, or say why the file is none.

    Args:
        path: A regular file.

    Returns:
        The model, or the finding that ends the inspection.

    Raises:
        OSError: The file cannot be opened, or is a folder, a pipe or a device.
    """
    try:
        status = path.stat()
    except FileNotFoundError as error:
        message = f"lint_onnx: {path}: no such file; give the path of an .onnx file"
        raise FileNotFoundError(message) from error
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"lint_onnx: {path} is no regular file; give the path of an .onnx file")
    if status.st_size == 0:
        return UNREADABLE.found("file", "the file is empty")
    if status.st_size > _MOST_BYTES:
        return UNREADABLE.found("file", "the file has 2 GiB or more, which protobuf does not hold")
    with path.open("rb") as file:
        data = file.read(status.st_size)
    if data.startswith(b"version https://git-lfs"):
        return UNREADABLE.found("file", "the file is a Git LFS pointer and not the model")
    return _decoded(data)


def load_model(path: str | os.PathLike[str], *, external_data: bool = True) -> onnx.ModelProto:
    """A model, with the weights beside it unless `external_data` is False.

    Raises:
        ValueError: The file is none; the message names it.
    """
    from onnx.external_data_helper import load_external_data_for_model

    found = _decoded(read_content(path, "ONNX file", _MOST_BYTES))
    if isinstance(found, Finding):
        raise ValueError(f"{os.fspath(path)} cannot be read as an ONNX file: {found.reason}")
    if external_data:
        try:
            load_external_data_for_model(found, str(Path(path).parent))
        except Exception as error:  # whatever onnx raises, its weights cannot be had
            raise ValueError(f"{os.fspath(path)}: its weights cannot be read: {error}") from error
    return found


def _decoded(data: bytes) -> onnx.ModelProto | Finding:
    import onnx
    from google.protobuf.message import DecodeError

    problem = wire_problem(data, onnx.ModelProto.DESCRIPTOR)
    if problem is not None:
        return UNREADABLE.found("file", problem)
    try:
        model = onnx.ModelProto()
        model.ParseFromString(data)
    except DecodeError as error:
        return UNREADABLE.found("file", f"protobuf does not decode it ({error})")
    if not model.HasField("graph"):
        return EMPTY.found("file", "the model has no graph")
    if not model.graph.node:
        return EMPTY.found("file", "the graph has no node")
    return model
