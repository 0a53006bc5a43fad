"""Compiled files: a program and its constants in one safetensors file.

The header's metadata has one entry, ``bevquant_hybrid``: JSON with ``schema``, ``written_by``,
``sha256``, the program as `bevquant_int8sim` writes programs, and what it is compiled for. The
tensors of the file are its constants. ``sha256`` is that of the whole file with 64 zeros in its own
place.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors.torch import save

from bevquant_int8sim import program as int8sim
from bevquant_int8sim.program import OperatorCall, Ref, Step, TensorType, from_document, to_document
from bevquant_quantizers.documents import (
    DocumentError,
    Size,
    as_form,
    parse_json,
    read_content,
    read_tensors,
    write_whole,
)

from ._operators import find_operator, is_known
from ._program import Port, Program, flatten, used_constants

SCHEMA = 3
_ENTRY = "bevquant_hybrid"
_WHAT = "file of compile_model"
_UNSIGNED = "0" * 64
_DType = Literal["bool", "float32", "float64", "int16", "int32", "int64", "int8", "uint8"]


class _PortData(msgspec.Struct):
    name: str
    operand: str
    dtype: _DType
    shape: tuple[Size, ...] | None
    scale: str | None
    axis: int
    quantized: Literal["qint8", "qint16", "qint32"] | None
    rounding: Literal["half_up", "half_even"]


class _FileData(msgspec.Struct):
    name: str
    march: str
    options: dict[str, Any]
    inputs: tuple[_PortData, ...]
    outputs: tuple[_PortData, ...]
    program: dict[str, Any]


def write_program(program: Program, path: Path, written_by: str) -> None:
    """Write a program atomically."""
    document, tensors = to_document(program)
    data = {
        "schema": SCHEMA,
        "written_by": written_by,
        "sha256": _UNSIGNED,
        "name": program.name,
        "march": program.march,
        "options": dict(program.options),
        "inputs": [_port_data(port) for port in program.inputs],
        "outputs": [_port_data(port) for port in program.outputs],
        "program": document,
    }
    text = json.dumps(data, ensure_ascii=True, allow_nan=False)
    content = save(tensors, metadata={_ENTRY: text})
    digest = hashlib.sha256(content).hexdigest().encode()
    content = content.replace(_UNSIGNED.encode(), digest, 1)
    write_whole(path, content, parents=True)


def read_program(path: Path) -> Program:
    """Read and check what `write_program` wrote. Nothing is unpickled."""
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
        given = as_form(data, _FileData, where="its program", what="program of compile_model")
        read = from_document(given.program, held.tensors, libraries=("bevquant_hybrid",))
        steps = {field.name: getattr(read, field.name) for field in fields(int8sim.Program)}
        program = Program(
            **{**steps, "origin": str(path)},
            name=given.name,
            march=given.march,
            options=given.options,
            inputs=tuple(_port(port) for port in given.inputs),
            outputs=tuple(_port(port) for port in given.outputs),
        )
        _validate(program)
    except (TypeError, ValueError) as error:
        raise DocumentError(f"{path}: {error}") from error
    return program


def _check_sum(path: Path, content: bytes, digest: Any) -> None:
    signed = str(digest).encode()
    unsigned = content.replace(signed, _UNSIGNED.encode(), 1) if len(signed) == 64 else b""
    if hashlib.sha256(unsigned).hexdigest().encode() != signed:
        raise DocumentError(
            f"{path}: truncated or changed: its checksum is not that of its content; copy it again "
            "or compile the model again"
        )


def _port_data(port: Port) -> dict[str, Any]:
    dtype = str(port.dtype).removeprefix("torch.")
    return {**vars(port), "operand": port.operand.name, "dtype": dtype}


def _port(data: _PortData) -> Port:
    given = msgspec.structs.asdict(data)
    return Port(**{**given, "operand": Ref(data.operand), "dtype": getattr(torch, data.dtype)})


def _validate(program: Program) -> None:
    """Check operators, arguments, inputs and outputs, which `from_document` does not."""
    for number, step in enumerate(program.steps):
        _check_call(f"step {number} ({step.operator or step.op})", step)
    untyped = [n for n, v in program.values.items() if not isinstance(v.form, TensorType)]
    if untyped:
        raise ValueError(f"the value {untyped[0]!r} has no type of a tensor")
    positional, named = program.signature
    for what, nested, ports in (
        ("inputs", positional, program.inputs),
        ("outputs", program.result, program.outputs),
    ):
        if flatten(nested, f"its {what}").tensors != [port.operand for port in ports]:
            raise ValueError(f"its {what} are not nested as many as they are")
    if named or program.sparse_inputs or program.guards:
        raise ValueError("its inputs have names, sites or sizes of their own")
    names = [port.operand.name for port in program.inputs]
    for port in program.inputs:
        name = port.operand.name
        made = names.count(name) > 1 or any(name in step.outputs for step in program.steps)
        if port.shape is None or made or name in program.constants:
            raise ValueError(f"the input {port.name!r} is a constant or a result, or has no shape")
    for port in (*program.inputs, *program.outputs):
        if port.scale is not None and port.scale not in program.constants:
            raise ValueError(f"the scale of {port.name!r}, the tensor {port.scale!r}, is missing")
        if port.quantized is not None and port.scale is None:
            raise ValueError(f"the output {port.name!r} is quantized and has no scale")
    idle = sorted(set(program.constants) - set(used_constants(program, program.constants)))
    if idle:
        raise ValueError(f"it holds tensors that nothing reads: {', '.join(idle)}")


def _check_call(where: str, step: Step) -> None:
    if not isinstance(step, OperatorCall) or not is_known(step.operator):
        raise ValueError(f"{where}: a program may not call that")
    given = step.given
    arguments = find_operator(step.operator)._schema.arguments
    schema = {argument.name: argument for argument in arguments}
    for name, value in given.items():
        if name not in schema:
            raise ValueError(f"{where}: it has no argument {name!r}")
        kind = str(schema[name].type)
        if not _fits(kind, value) and not (name == "dtype" and isinstance(value, torch.dtype)):
            raise ValueError(f"{where}: {name}={value!r} is no {kind}")
    absent = [n for n, a in schema.items() if n not in given and not a.has_default_value()]
    if absent:
        raise ValueError(f"{where}: {', '.join(absent)} missing")


def _fits(kind: str, value: Any) -> bool:
    """Whether a value may stand for an argument of a type as schemas print it."""
    if kind.startswith("Optional["):
        return value is None or _fits(kind[len("Optional[") : -1], value)
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        return isinstance(value, tuple) and all(_fits(inner, item) for item in value)
    # Torch takes numbers in the place of tensors.
    kinds: dict[str, Any] = {"int": int, "bool": bool, "str": str, "Tensor": Ref | int | float}
    kinds |= dict.fromkeys(("number", "Scalar", "float"), int | float)
    return isinstance(value, kinds.get(kind, ())) and isinstance(value, bool) == (kind == "bool")
