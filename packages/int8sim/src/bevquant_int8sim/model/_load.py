"""Reading an integer model from a folder: checked before anything is built of it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from bevquant_int8sim.model._form import ACCUMULATORS, FLOAT, Form, Integers
from bevquant_int8sim.model._json_values import from_json
from bevquant_int8sim.model._program import Program, Step, Value
from bevquant_int8sim.model._save import KIND, MANIFEST, PROGRAM, SCHEMA, TENSORS, manifest_text
from bevquant_int8sim.model._saved_calls import READABLE, named_function, rebuilt_module
from bevquant_int8sim.model._validate import validate

__all__ = ["load_program"]


def load_program(folder: str | os.PathLike[str], device: torch.device | str = "cpu") -> Program:
    """Read what `save_program` wrote. Nothing is unpickled, no code is looked up by name.

    Args:
        folder: Where it was written.
        device: Where its tensors go.

    Raises:
        ValueError: A file is missing or changed, the schema is another one, a tensor is missing or
            of another type or shape than its step needs, or a step names what a saved program may
            not call. The message says which.
    """
    content = _content(Path(folder))
    try:
        tensors = load(content[TENSORS])
        data = json.loads(content[PROGRAM])
        program = _program(data, tensors)
        validate(program)
    except (SafetensorError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder}: {error}") from error
    return replace(program, steps=tuple(_on_device(step, device) for step in program.steps))


def _on_device(step: Step, device: torch.device | str) -> Step:
    tensors = {name: tensor.to(device) for name, tensor in step.tensors.items()}
    module = None if step.module is None else step.module.to(device)
    return replace(step, tensors=tensors, module=module)


def _content(folder: Path) -> dict[str, bytes]:
    text, sums = _manifest(folder)
    content = {}
    for name in (PROGRAM, TENSORS):
        try:
            content[name] = (folder / name).read_bytes()
        except FileNotFoundError as error:
            raise ValueError(f"{folder}: {name} is missing") from error
        except OSError as error:
            raise ValueError(f"{folder}: {name} cannot be read: {error}") from error
        if hashlib.sha256(content[name]).hexdigest() != sums.get(name):
            raise ValueError(
                f"{folder}: {name} is not what was saved (its checksum differs); copy the folder "
                "again or save the model again"
            )
    if text != manifest_text(content).encode():
        raise ValueError(f"{folder}: {MANIFEST} is not as it was written")
    return content


def _manifest(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The bytes of the manifest, and the checksums in it."""
    try:
        text = (folder / MANIFEST).read_bytes()
        manifest = json.loads(text)
    except FileNotFoundError as error:
        raise ValueError(f"{folder}: no saved integer model: {MANIFEST} is missing") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: {MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise ValueError(f"{folder}: {MANIFEST} is not that of a saved integer model")
    if manifest.get("schema") != SCHEMA:
        raise ValueError(
            f"{folder}: schema {manifest.get('schema')!r}, this version reads {SCHEMA}; save the "
            "model again with this version"
        )
    sums = manifest.get("sha256")
    return text, sums if isinstance(sums, dict) else {}


def _program(data: Any, tensors: dict[str, Tensor]) -> Program:
    used: set[str] = set()
    steps = tuple(_step(number, step, tensors, used) for number, step in enumerate(data["steps"]))
    unused = sorted(set(tensors) - used)
    if unused:
        raise ValueError(f"tensors that no step uses: {', '.join(unused)}")
    values = {
        name: Value(_form(v["form"]), str(v["source"]), bool(v["relu"]))
        for name, v in data["values"].items()
    }
    return Program(
        signature=from_json(data["signature"]),
        sparse_inputs=dict(data["sparse_inputs"]),
        steps=steps,
        values=values,
        result=from_json(data["result"]),
    )


def _form(data: Any) -> Form:
    if isinstance(data, dict):
        return Integers(
            float(data["scale"]), int(data["bits"]), int(data["low"]), int(data["high"])
        )
    if data not in (ACCUMULATORS, FLOAT, "sites", "host"):
        raise ValueError(f"unknown form {data!r} of a value")
    return str(data)


def _step(number: int, data: Any, tensors: dict[str, Tensor], used: set[str]) -> Step:
    path = data["path"] or "the model"
    own: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name in data["tensors"]:
        if name not in tensors:
            raise ValueError(f"{path}: the tensor {name} is missing")
        used.add(name)
        rest = name.removeprefix(f"{number}.")
        if rest.startswith("module."):
            state[rest.removeprefix("module.")] = tensors[name]
        else:
            own[rest] = tensors[name]
    args = from_json(data["args"])
    function = module = None
    try:
        if "function" in data:
            function = named_function(data["function"])
            if function is getattr and args[1] not in READABLE:
                raise ValueError(f"it reads the attribute {args[1]!r}")
        if "module" in data:
            module = rebuilt_module(from_json(data["module"]), state)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Step(
        op=str(data["op"]),
        path=str(data["path"]),
        args=args,
        outputs=tuple(str(name) for name in data["outputs"]),
        kwargs=from_json(data["kwargs"]),
        attributes=from_json(data["attributes"]),
        tensors=own,
        function=function,
        module=module,
        reason=str(data["reason"]),
    )
