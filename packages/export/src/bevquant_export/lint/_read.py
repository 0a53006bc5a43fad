"""Read a file of any content, in memory bounded by its size."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bevquant_export.lint._graph import Finding, Rule
from bevquant_quantizers.documents import read_content

if TYPE_CHECKING:
    import onnx

_MOST_BYTES = 2**31 - 1
# fmt: off
UNREADABLE = Rule("ONX001", "error",
    "the file is one complete ModelProto: below 2 GiB, below 500,000 fields, below 100 levels",
    "write the file again; if it came over a network or from Git LFS, fetch it again")
EMPTY = Rule("ONX002", "error",
    "the model has a graph with at least one node",
    "look whether this is the file that was meant, and export again")
# fmt: on


def read_model(path: Path) -> onnx.ModelProto | Finding:
    """A model, or the finding that ends the inspection."""
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
    """A model, with external weights unless `external_data` is False."""
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


@contextmanager
def reading(path: str | os.PathLike[str], caller: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors while the content of a file is used into a ValueError that names the file."""
    try:
        yield
    except (ImportError, OSError, MemoryError):
        raise
    # A damaged graph lacks nodes or inputs: errors of any class. `kinds` are for a model's run.
    except Exception as error:
        named = isinstance(error, ValueError) and Path(path).name in str(error)
        if named or not isinstance(error, kinds or Exception):
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"{caller}: {os.fspath(path)} is not a file that can be used ({reason}); export it "
            "again, or let bevquant-lint name the node that is damaged"
        ) from error


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


_MOST_FIELDS = 500_000
_DEEPEST = 100
_VARINT, _BYTES = 0, 2

# Bytes by wire type; None where a number in the file says it.
_SIZES: dict[int, int | None] = {_VARINT: None, 1: 8, _BYTES: None, 5: 4}


def wire_problem(data: bytes, descriptor: Any) -> str | None:
    r"""Return the defect of an encoded message with its offset, or None.

    An empty submessage takes two bytes in a file and more than a hundred in memory, so the fields
    are counted first. Nesting too deep for a recursive reader is found without recursion, and text
    that is not UTF-8 before its first use.

    Example:
        >>> import onnx
        >>> wire_problem(b"\x3a\x05abc", onnx.ModelProto.DESCRIPTOR)
        'the field at byte 0 claims 5 bytes where 3 are left: the file is cut short'
    """
    fields: dict[str, dict[int, Any]] = {}
    outer = [(descriptor, 0, len(data))]
    count = 0
    while outer:
        kind, at, end = outer.pop()
        known = fields.get(kind.full_name)
        if known is None:
            known = fields[kind.full_name] = dict(kind.fields_by_number)
        while at < end:
            start = at
            count += 1
            if count > _MOST_FIELDS:
                return f"more than {_MOST_FIELDS:,} fields: no network has so many"
            tag, at = _varint(data, at, end)
            field = known.get(tag >> 3)
            wire = tag & 7
            if at < 0 or tag >> 3 == 0 or wire not in _SIZES:
                return f"no field can begin at byte {start}: the file is damaged or no ONNX file"
            size = _SIZES[wire]
            if size is None:
                size, at = _varint(data, at, end)
                size = 0 if wire == _VARINT else size
            if at < 0:
                return f"the field at byte {start} has no end: the file is damaged or cut short"
            if size > end - at:
                claim = f"claims {size} bytes where {end - at} are left"
                return f"the field at byte {start} {claim}: the file is cut short"
            if field is not None and wire == _BYTES:
                if field.type == field.TYPE_MESSAGE:
                    if len(outer) >= _DEEPEST - 1:
                        return f"messages are nested more than {_DEEPEST} deep at byte {at}"
                    outer += [(kind, at + size, end), (field.message_type, at, at + size)]
                    break
                if field.type == field.TYPE_STRING:
                    try:
                        data[at : at + size].decode("utf-8")
                    except UnicodeDecodeError:
                        return f"the text {field.name} at byte {at} is not UTF-8"
                elif field.type != field.TYPE_BYTES and kind.name != "TensorProto":
                    # A list packed into one field is as many numbers as that.
                    count += size
            at += size
    return None


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Read an integer; a position of −1 where it does not end in time."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, -1
