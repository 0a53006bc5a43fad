"""Compiled files: a program and its constants in one safetensors file.

The header's metadata has one entry, ``bevquant_hybrid``: JSON with ``schema``, ``written_by``,
``sha256`` and what `_as_json` makes of the program. The tensors of the file are its constants.
``sha256`` is that of the whole file with 64 zeros in its own place.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from bevquant_hybrid._whole_file import write_whole
from bevquant_hybrid.runtime._as_json import from_json, to_json
from bevquant_hybrid.runtime._program import Program
from bevquant_hybrid.runtime._validate import validate

__all__ = ["SCHEMA", "read_program", "write_program"]

SCHEMA = 1
_ENTRY = "bevquant_hybrid"
_UNSIGNED = "0" * 64


def write_program(program: Program, path: Path, written_by: str) -> None:
    """Write a program; whoever reads meanwhile finds the old file or the new one."""
    data = {"schema": SCHEMA, "written_by": written_by, "sha256": _UNSIGNED, **to_json(program)}
    text = json.dumps(data, ensure_ascii=True, allow_nan=False)
    content = save(dict(program.constants), metadata={_ENTRY: text})
    digest = hashlib.sha256(content).hexdigest().encode()
    content = content.replace(_UNSIGNED.encode(), digest, 1)
    write_whole(path, content)


def read_program(path: Path) -> Program:
    """Read and check what `write_program` wrote. Nothing is unpickled.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It was not written by `compile_model`, is truncated or changed, has another
            schema, lacks a tensor, or says what no program says. The message names the file.
    """
    content = path.read_bytes()
    data = _metadata(path, content)
    schema = data.get("schema")
    if schema != SCHEMA:
        raise ValueError(
            f"{path}: schema {schema!r}, where this version reads {SCHEMA}; compile the model "
            "again with this version"
        )
    _check_sum(path, content, data.get("sha256"))
    try:
        program = from_json(data, load(content))
        validate(program)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {_reason(error)}") from error
    return program


def _metadata(path: Path, content: bytes) -> dict[str, Any]:
    """The program as JSON, from a header that is all there."""
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length]
    if len(content) < 8 or content[8:9] != b"{":
        raise ValueError(f"{path}: no file of compile_model (it has no header of safetensors)")
    if len(header) < length:
        raise ValueError(
            f"{path}: truncated: {len(content)} bytes, and its header alone takes {8 + length}; "
            "copy it again or compile the model again"
        )
    try:
        fields = json.loads(header)
        data = json.loads(fields["__metadata__"][_ENTRY])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: no file of compile_model (its header holds no program: {_reason(error)})"
        ) from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: no file of compile_model (its program is no JSON object)")
    return data


def _check_sum(path: Path, content: bytes, digest: Any) -> None:
    signed = str(digest).encode()
    unsigned = content.replace(signed, _UNSIGNED.encode(), 1) if len(signed) == 64 else b""
    if hashlib.sha256(unsigned).hexdigest().encode() != signed:
        raise ValueError(
            f"{path}: truncated or changed: its checksum is not that of its content; copy it again "
            "or compile the model again"
        )


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
