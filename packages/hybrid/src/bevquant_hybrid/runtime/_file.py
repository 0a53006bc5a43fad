"""Compiled files: a program and its constants in one safetensors file.

The header's metadata has one entry, ``bevquant_hybrid``: JSON with ``schema``, ``written_by``,
``sha256`` and what `_as_json` makes of the program. The tensors of the file are its constants.
``sha256`` is that of the whole file with 64 zeros in its own place.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save

from bevquant_hybrid._whole_file import write_whole
from bevquant_hybrid.runtime._as_json import from_json, to_json
from bevquant_hybrid.runtime._program import Program
from bevquant_hybrid.runtime._validate import validate
from bevquant_quantizers.documents import DocumentError, parse_json, read_content, read_tensors

__all__ = ["SCHEMA", "read_program", "write_program"]

SCHEMA = 1
_ENTRY = "bevquant_hybrid"
_WHAT = "file of compile_model"
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
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    content = read_content(path, _WHAT)
    held = read_tensors(content, _WHAT, where=str(path))
    if _ENTRY not in held.metadata:
        raise DocumentError(f"{path}: no file of compile_model (its header holds no program)")
    data = parse_json(
        held.metadata[_ENTRY],
        dict[str, Any],
        where=f"{path}",
        what=_WHAT,
        head={"schema": SCHEMA},
        remedy="compile the model again with this version",
    )
    _check_sum(path, content, data.get("sha256"))
    try:
        program = from_json(data, held.tensors)
        validate(program)
    except (KeyError, TypeError, ValueError) as error:
        raise DocumentError(f"{path}: {_reason(error)}") from error
    return program


def _check_sum(path: Path, content: bytes, digest: Any) -> None:
    signed = str(digest).encode()
    unsigned = content.replace(signed, _UNSIGNED.encode(), 1) if len(signed) == 64 else b""
    if hashlib.sha256(unsigned).hexdigest().encode() != signed:
        raise DocumentError(
            f"{path}: truncated or changed: its checksum is not that of its content; copy it again "
            "or compile the model again"
        )


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
