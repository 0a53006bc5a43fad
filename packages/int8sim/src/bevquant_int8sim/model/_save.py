"""An integer model in a folder: written, and read with all checks before anything is built."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor

from bevquant_graph import Guard, ReadMembers, file_path
from bevquant_int8sim.model._form import Form, Integers, TensorType
from bevquant_int8sim.model._program import Program, Step, Value
from bevquant_int8sim.model._saved_calls import (
    READABLE,
    from_json,
    function_name,
    module_config,
    named_function,
    rebuilt_module,
    to_json,
)
from bevquant_int8sim.model._validate import validate
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
SCHEMA = 1
MANIFEST, PROGRAM, TENSORS = "manifest.json", "program.json", "tensors.safetensors"
CONSTANT = "constant."  # before the name that a program's constant has among the tensors


def save_program(program: Program, folder: str | os.PathLike[str]) -> None:
    """Write ``manifest.json`` (schema, checksums), ``program.json`` and ``tensors.safetensors``.

    The files are written to a folder beside `folder` that then replaces it: a reader finds either
    the whole old model or the whole new one. A folder with other content is not replaced.

    Raises:
        ValueError: A step cannot be saved (all are named, with remedies), `folder` holds something
            else than a saved model, or its parent does not exist.
    """
    target = file_path(folder, "folder")
    data, tensors = to_document(program)
    content = {
        PROGRAM: json.dumps(data, indent=1, allow_nan=False).encode(),
        TENSORS: save(tensors),
    }
    content[MANIFEST] = manifest_text(content).encode()
    _write(target, content)


def manifest_text(content: Mapping[str, bytes]) -> str:
    """Text of ``manifest.json`` for these files."""
    files = {name: hashlib.sha256(raw).hexdigest() for name, raw in content.items()}
    return json.dumps({"kind": KIND, "schema": SCHEMA, "sha256": files}, indent=1)


def to_document(program: Program) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A program in terms of JSON, and the tensors that this names.

    Raises:
        ValueError: A step cannot be saved: all are named, with what to do.
    """
    tensors = {f"{CONSTANT}{name}": t for name, t in program.constants.items()}
    problems: list[str] = []
    steps = []
    for number, step in enumerate(program.steps):
        try:
            steps.append(_step_data(step, f"{number}", tensors))
        except ValueError as error:
            problems.append(
                f"{step.path or 'the model'} ({step.attributes.get('what', step.op)}): {error}"
            )
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


def _step_data(step: Step, number: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "op": step.op,
        "path": step.path,
        "args": to_json(step.args),
        "kwargs": to_json(dict(step.kwargs)),
        "outputs": list(step.outputs),
        "attributes": to_json(dict(step.attributes)),
        "reason": step.reason,
    }
    found = {f"{number}.{name}": t for name, t in step.tensors.items()}
    if step.function is not None:
        data["function"] = _function_data(step)
    if step.module is not None:
        config = module_config(step.module)
        if isinstance(config, str):
            raise ValueError(config)
        data["module"] = to_json(config[0])
        found |= {f"{number}.module.{name}": t for name, t in config[1].items()}
    data["tensors"] = list(found)
    tensors |= found
    return data


def _function_data(step: Step) -> str:
    assert step.function is not None
    name = function_name(step.function)
    if name is None:
        what = getattr(step.function, "__name__", type(step.function).__name__)
        raise ValueError(f"{what} is not among the functions that can be saved")
    if name == "getattr" and step.args[1] not in READABLE:
        raise ValueError(f"it reads the attribute {step.args[1]!r}")
    return name


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

    Args:
        folder: The folder.
        device: Device of its tensors.
        libraries: Libraries whose operators it may call, beside torch's.

    Raises:
        ValueError: A file is missing or changed, the schema is another one, a tensor is missing or
            of another type or shape than its step needs, or a step names a function that a saved
            program may not call.
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
    steps = tuple(_on_device(step, device) for step in program.steps)
    return replace(program, steps=steps, constants=constants)


def from_document(
    data: Any, tensors: Mapping[str, Tensor], libraries: Collection[str] = ()
) -> Program:
    """Inverse of `to_document`, with a check of the program.

    Args:
        data: The JSON document.
        tensors: All tensors of the file.
        libraries: Libraries whose operators it may call, beside torch's.

    Raises:
        ValueError: It is no program, a tensor is missing or unused, or a step is invalid.
    """
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
        | Literal["float", "int32", "sites", "host"]
    )
    source: str
    relu: bool


class _StepData(msgspec.Struct):
    """A step; its arguments and attributes are what `_json_values` writes."""

    op: str
    path: str
    args: Any
    kwargs: Any
    outputs: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    attributes: Any
    reason: str
    tensors: list[str]
    function: str | None = None
    module: Any = None


class _MembersData(msgspec.Struct):
    """Of `ReadMembers`, as `_json_values` writes it; none of earlier versions."""

    asked: Any = []
    handed: Any = []


class _ProgramData(msgspec.Struct):
    signature: Any
    sparse_inputs: dict[str, str]
    result: Any
    values: dict[str, _ValueData]
    steps: list[_StepData]
    members: _MembersData = msgspec.field(default_factory=_MembersData)
    guards: list[Any] = []
    fixed: dict[str, list[tuple[Size, Size]]] = {}  # of earlier versions, which had no guards
    operations: dict[str, Count] = {}
    constants: list[str] = []


class _Manifest(msgspec.Struct):
    sha256: dict[str, str]


def _on_device(step: Step, device: torch.device | str) -> Step:
    tensors = {name: tensor.to(device) for name, tensor in step.tensors.items()}
    module = None if step.module is None else step.module.to(device)
    return replace(step, tensors=tensors, module=module)


def _content(folder: Path) -> dict[str, bytes]:
    text = read_content(folder / MANIFEST, "saved integer model")
    manifest = parse_json(
        text,
        _Manifest,
        where=f"{folder / MANIFEST}",
        what="saved integer model",
        head={"kind": KIND, "schema": SCHEMA},
        remedy="save the model again with this version",
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
    steps = tuple(
        _step(number, step, tensors, used, libraries) for number, step in enumerate(data.steps)
    )
    unused = sorted(set(tensors) - used)
    if unused:
        raise ValueError(f"tensors that no step uses: {', '.join(unused)}")
    signature = from_json(data.signature)
    match signature:
        case (tuple(), dict()) if all(isinstance(name, str) for name in signature[1]):
            pass
        case _:
            raise ValueError("signature: expected positional and named inputs")
    program = Program(
        signature=signature,
        sparse_inputs=data.sparse_inputs,
        members=ReadMembers(
            dict(from_json(data.members.asked)), tuple(from_json(data.members.handed))
        ),
        guards=(
            *map(Guard.from_json, data.guards),
            *(
                Guard(f"s0 == {n}", ((name, axis),))
                for name, s in data.fixed.items()
                for axis, n in s
            ),
        ),
        steps=steps,
        values={n: Value(_form(v.form), v.source, v.relu) for n, v in data.values.items()},
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


def _step(
    number: int,
    data: _StepData,
    tensors: Mapping[str, Tensor],
    used: set[str],
    libraries: Collection[str],
) -> Step:
    path = data.path or "the model"
    own: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name in data.tensors:
        if name not in tensors:
            raise ValueError(f"{path}: the tensor {name} is missing")
        used.add(name)
        rest = name.removeprefix(f"{number}.")
        if rest.startswith("module."):
            state[rest.removeprefix("module.")] = tensors[name]
        else:
            own[rest] = tensors[name]
    function = module = None
    try:
        args = from_json(data.args)
        kwargs, attributes = from_json(data.kwargs), from_json(data.attributes)
        if type(args) is not tuple or type(kwargs) is not dict or type(attributes) is not dict:
            raise ValueError("its arguments or attributes are not as they are written")
        if data.function is not None:
            function = named_function(data.function, libraries)
            if function is getattr and (len(args) < 2 or args[1] not in READABLE):
                raise ValueError(f"it reads the attribute {args[1:]!r}")
        if data.module is not None:
            module = rebuilt_module(from_json(data.module), state)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Step(
        op=data.op,
        path=data.path,
        args=args,
        outputs=data.outputs,
        kwargs=kwargs,
        attributes=attributes,
        tensors=own,
        function=function,
        module=module,
        reason=data.reason,
    )
