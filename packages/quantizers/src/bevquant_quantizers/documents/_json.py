"""JSON of a typed form: bounded in depth and numbers, its errors with the field's path."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import msgspec
from msgspec import Meta

from bevquant_graph import file_path

from ._write import write_whole

T = TypeVar("T")

_DEPTH = 100  # levels of nesting; what the packages write has at most 20
_LARGEST_JSON = 1 << 29
_LARGEST = 1 << 40  # of any other file that is read at once

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A whole number that is not negative."""
Size = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A length of one axis, or an index along it."""
Finite = Annotated[float, Meta(ge=-1.7976931348623157e308, le=1.7976931348623157e308)]
"""A number that is neither NaN nor infinite."""
NotNegative = Annotated[float, Meta(ge=0, le=1.7976931348623157e308)]
"""A finite number that is not negative."""

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_LONG_INTEGER = re.compile(rb"(?<![\d.])-?\d{19,}(?![\d.eE])")
_FIELD = re.compile(r"^(.*) - at `(?:key in )?\$(.*)`$", re.DOTALL)


class DocumentError(ValueError):
    """A file cannot be read: the message names it, the field, what was expected and what came."""


def read_content(path: str | os.PathLike[str], what: str = "file", limit: int = _LARGEST) -> bytes:
    """The bytes of a regular file.

    Raises:
        DocumentError: There is no such file, it is no regular one, too large, or cannot be read.
    """
    file = file_path(path, what)
    try:
        if not file.is_file():
            how = "not a regular file" if os.path.lexists(file) else "no such file"
            raise DocumentError(f"cannot read {file}: {how}; expected {a(what)}")
        if file.stat().st_size > limit:
            raise DocumentError(f"{file} is not {a(what)}: it is larger than {limit} bytes")
        return file.read_bytes()
    except (OSError, MemoryError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise DocumentError(f"cannot read {file}: {why}") from error
    except ValueError as error:
        if isinstance(error, DocumentError):
            raise
        raise DocumentError(f"{os.fspath(path)!r} is no path: {error}") from error


def read_json(
    path: str | os.PathLike[str],
    form: type[T] | Any = Any,
    *,
    what: str = "JSON document",
    head: Mapping[str, Any] | None = None,
    remedy: str = "",
) -> T | Any:
    """Read a JSON file of a form; as `parse_json`, the message begins with the file's name.

    Raises:
        DocumentError: It is no such file.
    """
    return parse_json(
        read_content(path, what, _LARGEST_JSON),
        form,
        where=os.fspath(path),
        what=what,
        head=head,
        remedy=remedy,
    )


def parse_json(
    text: bytes | str,
    form: type[T] | Any = Any,
    *,
    where: str = "",
    what: str = "JSON document",
    head: Mapping[str, Any] | None = None,
    remedy: str = "",
) -> T | Any:
    """JSON text as a value of a form.

    At most 100 levels deep, integers within 64 bits, numbers finite; no NaN, no Infinity.

    Args:
        text: UTF-8.
        form: Any type of msgspec: a `msgspec.Struct`, a dataclass, a TypedDict, `dict`, …
        where: Name of the text in messages: the file, and the position in it.
        what: Expected content, for messages: "ranges file".
        head: Identifying fields, checked before all others: the value of each, or a tuple of
            accepted values.
        remedy: What to do about another value, such as "save the ranges again".

    Raises:
        DocumentError: It is something else.

    Example:
        >>> class Plan(msgspec.Struct):
        ...     frames: list[Count]
        >>> parse_json('{"frames": [1, 2]}', Plan).frames
        [1, 2]
    """
    begin = f"{where} is not {a(what)}" if where else f"not {a(what)}"
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        if head:
            _check_head(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]), head, remedy)
        value: T = msgspec.json.decode(raw, type=form)
    except RecursionError as error:
        raise DocumentError(f"{begin}: it is nested more than {_DEPTH} levels deep") from error
    except UnicodeDecodeError as error:
        raise DocumentError(f"{begin}: it is not UTF-8") from error
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise DocumentError(f"{begin}: {_message_of(str(error))}") from error
    _check_bounds(raw, begin)
    return value


def as_form(value: Any, form: type[T] | Any, *, where: str, what: str) -> T | Any:
    """A value that JSON gave, such as part of a document, as one of a typed form.

    Raises:
        DocumentError: It is of another form.
    """
    try:
        return msgspec.convert(value, form)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DocumentError(f"{where} is not {a(what)}: {_message_of(str(error))}") from error


def _check_head(found: Mapping[str, msgspec.Raw], head: Mapping[str, Any], remedy: str) -> None:
    for key, wanted in head.items():
        allowed = wanted if isinstance(wanted, tuple) else (wanted,)
        value = msgspec.json.decode(found[key]) if key in found else None
        if not any(type(value) is type(one) and value == one for one in allowed):
            choices = " or ".join(map(repr, allowed))
            then = f"; {remedy}" if remedy else ""
            raise ValueError(f"{key} {_short(value)}, expected {choices}{then}")


def a(what: str) -> str:
    """`what` with its article."""
    return f"{'an' if what[:1].lower() in 'aeiou.' else 'a'} {what}"


def _message_of(message: str) -> str:
    """Msgspec's message with the field first: "at quantizers[…].amax: expected `float`, …"."""
    match = _FIELD.match(message)
    if match is None:
        return _lower(message)
    return f"at {match[2].lstrip('.').replace('...', '…') or 'the top'}: {_lower(match[1])}"


def _lower(text: str) -> str:
    known = text.startswith(
        ("Expected", "Object", "Invalid", "Number", "Integer", "Array", "Input")
    )
    return text[:1].lower() + text[1:] if known else text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _check_bounds(raw: bytes, begin: str) -> None:
    """Depth and integers, which msgspec leaves open where a form does; `raw` is valid JSON."""
    if raw.count(b"[") + raw.count(b"{") > _DEPTH:
        depth = 0
        for byte in _STRING.sub(b"", raw).translate(None, _NO_BRACKET):
            depth += 1 if byte in b"[{" else -1
            if depth > _DEPTH:
                raise DocumentError(f"{begin}: it is nested more than {_DEPTH} levels deep")
    if _LONG_INTEGER.search(raw):
        for number in _LONG_INTEGER.findall(_STRING.sub(b'""', raw)):
            if len(number) > 20 or not -(2**63) <= int(number) < 2**63:
                raise DocumentError(f"{begin}: an integer of {len(number)} digits is out of range")


_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


def plain(value: Any) -> Any:
    """Any result as JSON types.

    Dataclasses and named tuples become objects by field, keys become text, arrays and tensors
    lists; NaN and infinities become None, and unknown types text.

    Example:
        >>> plain({0.5: (float("nan"), Path("runs"))})
        {'0.5': [None, 'runs']}
    """
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return [plain(item) for item in value] if isinstance(value, Iterable) else str(value)


def write_json(path: str | os.PathLike[str], content: Any) -> Path:
    """Write the content, converted by `plain`, whole or not at all, as standard JSON.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read_json(write_json(f"{folder}/found.json", {"sqnr_db": math.inf}))
        {'sqnr_db': None}
    """
    text = json.dumps(plain(content), indent=2, allow_nan=False, ensure_ascii=False)
    return write_whole(path, text + "\n")


class JsonDocument:
    """Base class of results that are stored as JSON: a plan, a table.

    A subclass defines `to_json` and `from_json`; `save` and `load` use them.

    Example:
        >>> import tempfile
        >>> class Number(JsonDocument):
        ...     def __init__(self, value):
        ...         self.value = value
        ...     def to_json(self):
        ...         return str(self.value)
        ...     @classmethod
        ...     def from_json(cls, text):
        ...         return cls(parse_json(text, Count))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Number.load(Number(3).save(f"{folder}/number.json")).value
        3
    """

    def to_json(self) -> str:
        """The JSON text."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read and check the text that `to_json` wrote.

        Raises:
            ValueError: Any other text.
        """
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the JSON to a temporary name, rename it to `path` and return the path."""
        return write_whole(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote.

        Raises:
            DocumentError: Any other file; the message names it.
        """
        content = read_content(path, cls.__name__, _LARGEST_JSON)
        try:
            return cls.from_json(content.decode("utf-8"))
        except ValueError as error:
            raise DocumentError(f"{os.fspath(path)}: {error}") from error
