"""What a model computes with the coordinates of voxels alone, which is nothing of a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bevquant_export.sparse._beginning import is_float_conv

__all__ = ["coord_inputs", "for_coords", "names_in"]


def for_coords(program: Any) -> set[str]:
    """What is computed for the coordinates alone: the engine gets these ready made."""
    read = set(names_in(program.result))
    found: set[str] = set()
    for step in reversed(program.steps):
        made = set(step.outputs)
        if step.op in ("float", "move") and not made & read and not is_float_conv(step):
            found |= made
        elif step.op not in ("host", "sites"):
            read.update(step.inputs)
    return found


def coord_inputs(program: Any, made: set[str]) -> set[str]:
    """Inputs of the program that sets of voxels are made of, and nothing else."""
    wanted: set[str] = set()
    for step in reversed(program.steps):
        if step.op == "sites" or wanted.intersection(step.outputs):
            if step.op in ("sites", "host", "float", "move"):
                wanted.update(step.inputs)
    layers = [s for s in program.steps if s.op not in ("sites", "host", "float", "move")]
    return wanted - made - {name for step in layers for name in step.inputs}


def names_in(value: Any) -> Iterator[str]:
    """Values in the nested containers of a program's result; of sparse tensors the features."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from names_in(item)
    elif hasattr(value, "sites"):
        yield value.features
    elif isinstance(getattr(value, "name", None), str):
        yield value.name
