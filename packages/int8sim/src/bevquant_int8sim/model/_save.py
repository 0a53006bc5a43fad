"""An integer model in a folder: written, and read with all checks before anything is built."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor

from bevquant_graph import Guard, ReadMembers, file_path
from bevquant_int8sim.model._form import Form, Integers, TensorType
from bevquant_int8sim.model._program import Program, Value
from bevquant_int8sim.model._saved_calls import from_json, to_json
from bevquant_int8sim.model._saved_steps import StepReader, step_data
from bevquant_int8sim.model._step import OperatorCall, names_in
from bevquant_quantizers.documents import (
    Count,
    DocumentError,
    Finite,
    Size,
    as_form,
    parse_json,
    read_content,
    read_tensors,
    write_folder,
    write_whole,
)

KIND = "bevquant_int8sim.IntegerModel"
SCHEMA = 2
MANIFEST, PROGRAM, TENSORS = "manifest.json", "program.json", "tensors.safetensors"
CONSTANT = "constant."  # before the name that a program's constant has among the tensors


def save_program(program: Program, folder: str | os.PathLike[str]) -> None:
    """Write ``manifest.json`` (schema, checksums), ``program.json`` and ``tensors.safetensors``."""
    target = file_path(folder, "folder")
    data, tensors = to_document(program)
    content = {
        PROGRAM: json.dumps(data, indent=1, allow_nan=False).encode(),
        TENSORS: save(tensors),
    }
    content[MANIFEST] = manifest_text(content).encode()
    # Written beside `folder`, which it then replaces: a reader finds the whole old model or the
    # whole new one. A folder with other content is not replaced.
    _write(target, content)


def manifest_text(content: Mapping[str, bytes]) -> str:
    """Text of ``manifest.json`` for these files."""
    files = {name: hashlib.sha256(raw).hexdigest() for name, raw in content.items()}
    return json.dumps({"kind": KIND, "schema": SCHEMA, "sha256": files}, indent=1)


def to_document(program: Program) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A program in terms of JSON, and the tensors that this names."""
    tensors = {f"{CONSTANT}{name}": t for name, t in program.constants.items()}
    problems: list[str] = []
    steps = []
    for number, step in enumerate(program.steps):
        try:
            steps.append(step_data(step, f"{number}", tensors))
        except ValueError as error:
            problems.append(f"{step.where} ({step.label}): {error}")
    if problems:
        raise ValueError(
            f"save: {len(problems)} steps cannot be written to a file: {'; '.join(problems)}. "
            "Simulate the part of the model without them, keep them outside of it, or make them "
            "operators (torch.library.custom_op): only torch's own layers and functions and "
            "registered operators are saved"
        )
    data = {
        "signature": to_json(program.signature),
        "sparse_inputs": dict(program.sparse_inputs),
        "members": {
            "asked": to_json([*program.members.asked.items()]),
            "handed": to_json([*program.members.handed]),
        },
        "guards": [guard.to_json() for guard in program.guards],
        "result": to_json(program.result),
        "values": {
            name: {"form": _form_data(v.form), "source": v.source, "relu": v.relu}
            for name, v in program.values.items()
        },
        "steps": steps,
        "operations": program.operations,
        **({"constants": list(program.constants)} if program.constants else {}),
    }
    # safetensors refuses tensors that share memory.
    return data, {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}


def _form_data(form: Form) -> Any:
    if isinstance(form, TensorType):
        return [str(form.dtype).removeprefix("torch."), form.shape]
    return asdict(form) if isinstance(form, Integers) else form


def _write(folder: Path, content: dict[str, bytes]) -> None:
    if not folder.parent.is_dir():
        raise ValueError(f"cannot write {folder}: the folder {folder.parent} does not exist")
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise ValueError(
            f"cannot write {folder}: it exists and is no saved integer model; give another folder"
        )
    with write_folder(folder) as work:
        for name, raw in content.items():
            write_whole(work / name, raw)


# Reading an integer model from a folder: checked before anything is built of it.


def load_program(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    libraries: Collection[str] = (),
) -> Program:
    """Read a folder of `save_program`. Nothing is unpickled, no code is looked up by name.

    It may call operators of `libraries`, beside torch's.
    """
    folder = file_path(folder, "saved model")
    content = _content(folder)
    tensors = read_tensors(content[TENSORS], where=f"{folder / TENSORS}").tensors
    data = parse_json(content[PROGRAM], _ProgramData, where=f"{folder / PROGRAM}", what="program")
    try:
        program = replace(_program(data, tensors, libraries), origin=os.fspath(folder))
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DocumentError(f"{folder}: {error}") from error
    constants = {name: tensor.to(device) for name, tensor in program.constants.items()}
    steps = tuple(step.on_device(device) for step in program.steps)
    return replace(program, steps=steps, constants=constants)


def from_document(
    data: Any, tensors: Mapping[str, Tensor], libraries: Collection[str] = ()
) -> Program:
    """Inverse of `to_document`, with a check of the program."""
    form = as_form(data, _ProgramData, where="its program", what="program")
    try:
        return _program(form, tensors, libraries)
    except (KeyError, IndexError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(str(error)) from error


class _FormData(msgspec.Struct):
    scale: Finite
    bits: Size
    low: int
    high: int


_DType = Literal["bool", "float32", "float64", "int16", "int32", "int64", "int8", "uint8"]


class _ValueData(msgspec.Struct):
    form: (
        _FormData
        | tuple[_DType, tuple[Size, ...] | None]
        | Literal["float", "int32", "coordinates", "number"]
    )
    source: str
    relu: bool


class _MembersData(msgspec.Struct):
    """Of `ReadMembers`, as `_json_values` writes it; none of earlier versions."""

    asked: Any = []
    handed: Any = []


class _ProgramData(msgspec.Struct):
    signature: Any
    sparse_inputs: dict[str, str]
    result: Any
    values: dict[str, _ValueData]
    steps: list[dict[str, Any]]
    members: _MembersData = msgspec.field(default_factory=_MembersData)
    guards: list[Any] = []
    fixed: dict[str, list[tuple[Size, Size]]] = {}  # of earlier versions, which had no guards
    operations: dict[str, Count] = {}
    constants: list[str] = []


class _Manifest(msgspec.Struct):
    sha256: dict[str, str]


def _content(folder: Path) -> dict[str, bytes]:
    text = read_content(folder / MANIFEST, "saved integer model")
    manifest = parse_json(
        text,
        _Manifest,
        where=f"{folder / MANIFEST}",
        what="saved integer model",
        head={"kind": KIND, "schema": SCHEMA},
        remedy="make the model again with this version: "
        "bevquant_int8sim.simulate(model, example_inputs).save(folder)",
    )
    content = {name: read_content(folder / name, "part of a model") for name in (PROGRAM, TENSORS)}
    for name, raw in content.items():
        if hashlib.sha256(raw).hexdigest() != manifest.sha256.get(name):
            raise DocumentError(
                f"{folder}: {name} was changed since it was saved (its checksum differs); copy the "
                "folder again or save the model again"
            )
    if text != manifest_text(content).encode():
        raise DocumentError(f"{folder}: {MANIFEST} is not as it was written")
    return content


def _program(
    data: _ProgramData, tensors: Mapping[str, Tensor], libraries: Collection[str]
) -> Program:
    constants = {name: f"{CONSTANT}{name}" for name in data.constants}
    missing = [name for name, file in constants.items() if file not in tensors]
    if missing:
        raise ValueError(f"the tensor {missing[0]!r} is missing")
    used = set(constants.values())
    values = {n: Value(_form(v.form), v.source, v.relu) for n, v in data.values.items()}
    reader = StepReader(tensors, values, used, libraries)
    steps = tuple(reader.read(step) for step in data.steps)
    unused = sorted(set(tensors) - used)
    if unused:
        raise ValueError(f"tensors that no step uses: {', '.join(unused)}")
    signature = from_json(data.signature)
    match signature:
        case (tuple(), dict()) if all(isinstance(name, str) for name in signature[1]):
            pass
        case _:
            raise ValueError("signature: expected positional and named inputs")
    asked, handed = from_json(data.members.asked), from_json(data.members.handed)
    sizes = ((name, *size) for name, found in data.fixed.items() for size in found)
    fixed = [Guard(f"s0 == {size}", ((name, axis),)) for name, axis, size in sizes]
    program = Program(
        signature=signature,
        sparse_inputs=data.sparse_inputs,
        members=ReadMembers(dict(asked), tuple(handed)),
        guards=(*map(Guard.from_json, data.guards), *fixed),
        steps=steps,
        values=values,
        result=from_json(data.result),
        operations=data.operations,
        constants={name: tensors[file] for name, file in constants.items()},
    )
    validate(program)
    return program


def _form(data: _FormData | tuple[str, tuple[int, ...] | None] | str) -> Form:
    if isinstance(data, str):
        return data
    if isinstance(data, tuple):
        return TensorType(getattr(torch, data[0]), data[1])
    return Integers(data.scale, data.bits, data.low, data.high)


def validate(program: Program) -> None:
    """Check that steps read and make the values of the program, in order."""
    known = set(names_in(program.signature)) | set(program.sparse_inputs.values())
    known |= set(program.constants)
    program.members.refuse_misplaced(program.signature, program.result)
    for name, value in program.values.items():
        if isinstance(value.form, Integers):
            _check_form(name, value.form)
    for step in program.steps:
        missing = [name for name in step.inputs if name not in known]
        if missing:
            raise ValueError(
                f"{step.where}: {step.op} reads {missing[0]!r}, which no step made before"
            )
        again = [name for name in step.outputs if name in known]
        if again and isinstance(step, OperatorCall):
            raise ValueError(f"{step.where}: {step.op} makes {again[0]!r}, which is there already")
        unknown = [name for name in step.outputs if name not in program.values]
        if unknown:
            raise ValueError(f"{step.where}: nothing is said about its output {unknown[0]!r}")
        known.update(step.outputs)
    missing = [name for name in names_in(program.result) if name not in known]
    if missing:
        raise ValueError(f"the result {missing[0]!r} is made by no step")


def _check_form(name: str, form: Integers) -> None:
    top = 2 ** (form.bits - 1) - 1 if 2 <= form.bits <= 16 else 0
    if not -top - 1 <= form.low <= 0 < form.high <= top or not form.scale > 0:
        raise ValueError(f"value {name}: {form!r} are no integers of a positive scale")
