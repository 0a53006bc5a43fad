"""Which sizes follow the number of voxels, or what a mask chose: the captured graph says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bevquant_export.dense._program_of import QdqProgram, integer_model, ports_of
from bevquant_int8sim.program import Program, Ref, names_in

_TABLE = 2  # axes: pictures and matrices of cameras have more


def chooses_rows(integer: QdqProgram) -> bool:
    """Whether a size depends on values, as of ``x[mask]``: such are free in every file."""
    model = integer_model(integer)
    if model is None or model.source is None:
        return False
    made = (node.meta.get("val") for node in model.source.held)
    tensors = (value for value in made if isinstance(value, Tensor))
    return any(_is_found(size) for value in tensors for size in value.shape)


def free_sizes(
    integer: QdqProgram, shapes: Mapping[str, Any], hosts: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shapes with a name in the place of every size that is free, and the hosts that are not.

    Args:
        integer: A program that was lowered from a graph.
        shapes: Of its tensors in a run.
        hosts: Its other values in that run.
    """
    model = integer_model(integer)
    assert model is not None
    assert model.source is not None
    held = model.source.held
    values = {name: node.meta.get("val") for node, forms in held.items() for name in forms.values()}
    for name, (_, node) in ports_of(model).items():
        values.setdefault(name, node.meta.get("val"))
    rows = _rows(model.program, shapes, values)
    free: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            free[name] = _named(value, shapes.get(name), rows)
        elif isinstance(value, tuple | list):
            parts = [part for part in value if isinstance(part, Tensor)]
            free[name] = tuple(
                _named(part, shape, rows)
                for part, shape in zip(parts, shapes.get(name, ()), strict=False)
            )
            free |= {f"{name}[{i}]": sizes for i, sizes in enumerate(free[name])}
    for name, shape in shapes.items():  # coordinates
        if name.endswith(".indices"):
            maker = name.removesuffix(".indices").removesuffix(".sites")
            free.setdefault(name, (f"voxels of {maker}", *shape[1:]))
    varying = _varying(model.program, shapes, free)
    return free, {name: value for name, value in hosts.items() if name not in varying}


def _symbols(size: Any) -> set[str]:
    return (
        {str(s) for s in size.node.expr.free_symbols} if isinstance(size, torch.SymInt) else set()
    )


def _is_found(size: Any) -> bool:
    """Whether the size is known once the values are."""
    return any(symbol.startswith("u") for symbol in _symbols(size))


def _rows(program: Program, shapes: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Symbols of the graph that stand for a number of voxels given, with a name for it.

    Beside voxels also the rows of any table given (points, their voxels, sets of voxels), as far
    as the model takes any number of them.
    """
    read = {step.args[0].name for step in program.steps if step.op == "sites"}
    read |= set(program.sparse_inputs)
    counts = {shapes[name][0] for name in read}
    given = set(names_in(program.signature)) | read
    found: dict[str, str] = {}
    tables: dict[str, str] = {}
    of_pictures: set[str] = set()
    for name in sorted(given):
        value = values.get(name)
        if not isinstance(value, Tensor) or not value.dim():
            continue
        if shapes[name][0] in counts:
            found |= dict.fromkeys(_symbols(value.shape[0]), "voxels")
        elif read and value.dim() <= _TABLE:
            tables |= dict.fromkeys(_symbols(value.shape[0]), f"rows of {name}")
        else:
            of_pictures.update(*map(_symbols, value.shape))
    return {name: what for name, what in tables.items() if name not in of_pictures} | found


def _named(
    value: Tensor, shape: tuple[int, ...] | None, rows: Mapping[str, str]
) -> tuple[int | str, ...]:
    """Sizes, with the expression of one that follows the voxels: those given, or those found."""
    return tuple(
        rows.get(str(n), str(n))
        if _symbols(n) & rows.keys() or _is_found(n)
        else int(n)
        if shape is None
        else shape[axis]
        for axis, n in enumerate(value.shape)
    )


def _varying(program: Program, shapes: Mapping[str, Any], free: Mapping[str, Any]) -> set[str]:
    """Numbers that are computed from values of tensors, or from sizes that are free."""
    found: set[str] = set()
    for step in program.steps:
        what = step.attributes.get("what")
        if step.op != "host" or what in ("getattr", "convolved_sites"):
            continue
        if what == "size" and isinstance(step.args[0], Ref):
            sizes = free.get(step.args[0].name, shapes.get(step.args[0].name, ()))
            varies = step.args[1] < len(sizes) and isinstance(sizes[step.args[1]], str)
        else:
            varies = any(name in found or name in shapes for name in names_in(step.args))
        if varies:
            found.update(step.outputs)
    return found
