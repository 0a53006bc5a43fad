"""Writing an integer model to a folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from bevquant_graph import file_path
from bevquant_int8sim.model._form import Form, Integers, TensorType
from bevquant_int8sim.model._json_values import to_json
from bevquant_int8sim.model._program import Program, Step
from bevquant_int8sim.model._saved_calls import READABLE, function_name, module_config
from bevquant_quantizers.documents import write_folder, write_whole

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
