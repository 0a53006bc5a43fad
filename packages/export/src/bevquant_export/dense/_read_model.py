"""A model lowered and run on its example: all shapes, and the free sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_export._errors import QdqError, refuse_no_values
from bevquant_export._inputs import bound
from bevquant_export._taken_numbers import refuse_decisions, taken_numbers
from bevquant_export.dense._source import (
    QdqProgram,
    Shape,
    Source,
    inputs_of,
    integer_model,
    ports_of,
    program_of,
)
from bevquant_graph import map_leaves
from bevquant_int8sim import IntegerModel
from bevquant_int8sim.program import Add, Coordinates, Program, SparseConv, Step, names_in

_TABLE = 2  # axes: pictures and matrices of cameras have more


def read_model(
    model: nn.Module | IntegerModel,
    args: Any,
    *,
    dynamic_batch: bool,
    voxels: bool = False,
    integer_inputs: bool = False,
    integer_sums: bool = False,
    decisions: bool = False,
    rows: bool = False,
    verify: bool = True,
) -> Source:
    """Lower `model` and run it on `args`.

    With `voxels`, sparse convolutions are allowed: the number of voxels is free then, and the
    number of frames a constant. With `decisions`, the file can check the forward's: those on
    numbers of rows, and those on values where all inputs are points or voxels. With `rows`, inputs
    that are tables have any number of them.
    """
    for path, value in model.named_parameters() if isinstance(model, nn.Module) else ():
        if value.is_floating_point() and value.dtype != torch.float32:
            raise QdqError(
                f"parameter {path} is {value.dtype}; expected float32. Call "
                "model.float() before it is quantized and calibrated; the profile says what the "
                "file's floats are"
            )
    integer = program_of(model, args, integer_sums, verify=verify)
    program, simulated = integer.program, integer_model(integer)
    sparse = [s.path for s in program.steps if isinstance(s, Coordinates | SparseConv)]
    sparse += ["an input"] if program.sparse_inputs else []
    if sparse and (not voxels or dynamic_batch):
        raise QdqError(
            f"{next(filter(None, sparse), 'the model')} is sparse; "
            + (
                "the number of frames is a constant of such files: dynamic_batch=False"
                if voxels
                else "export_sparse_onnx writes an encoder, export_detector a model with layers "
                "behind dense() as two files, profile='onnxruntime' all of it as one"
            )
        )
    given, called = dict(inputs_of(program, args)), dict(integer.names)
    grids: dict[str, tuple[Shape, int]] = {}
    for name, value in bound(program, args):
        if name in program.sparse_inputs:
            called[f"{name}.indices"] = f"{called[name]}.indices"
            shape = tuple(int(size) for size in value.spatial_shape)
            grids[program.sparse_inputs[name]] = shape, int(value.batch_size)
    read = {called[n]: value for n, value in given.items() if isinstance(value, Tensor)}
    refuse_no_values(read, QdqError)
    for name, value in given.items():
        if sparse or not isinstance(value, Tensor) or value.dtype == torch.float32:
            continue
        if value.is_floating_point() or value.is_complex() or not integer_inputs:
            raise QdqError(
                f"input {called[name]} is {value.dtype}; expected float32. Give "
                "float32 tensors, and compute what depends on others outside of this model"
            )
    ranges: dict[str, float] = {}
    dtypes: dict[str, torch.dtype] = {}
    shapes, hosts = _run(integer, args, ranges, dtypes)
    wider: dict[str, Any] = {}
    wider_hosts: dict[str, Any] = {}
    if sparse:
        for name in names_in(program.result):  # a sparse tensor's coordinates are a result too
            if program.values[name].form == "coordinates":
                if name in hosts:
                    shapes[f"{name}.indices"] = tuple(hosts[name].indices.shape)
                dtypes.setdefault(f"{name}.indices", torch.int32)
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    chosen = _chooses_rows(integer)
    tables = _are_tables(tensors, chosen=chosen)
    if simulated is not None and not (decisions and (sparse or tables)):
        refuse_decisions(simulated, "export_qdq_onnx", rows=decisions)
    rows = rows and tables
    if sparse or chosen or rows:
        wider = _free_sizes(integer, shapes, rows=rows)
        wider = _free_sizes(integer, shapes, _fixed_numbers(integer, wider), rows=rows)
    varying = taken_numbers(program, wider)
    wider_hosts = hosts
    if dynamic_batch:
        double, found = map_leaves(_doubled, args), wider
        try:
            wider, wider_hosts = _run(integer, double, {}, {})
        except (RuntimeError, ValueError) as error:
            raise QdqError(
                "dynamic_batch=True, but the model does not run on twice the "
                f"batch: {error}. Export it with a fixed batch"
            ) from error
        wider |= {name: _overlaid(sizes, found.get(name, sizes)) for name, sizes in wider.items()}
    wider_hosts = {name: value for name, value in wider_hosts.items() if name not in varying}
    return Source(
        program, shapes, hosts, dtypes, wider, wider_hosts,
        {name: called[name] for name, value in given.items() if isinstance(value, Tensor)},
        {called[name]: value for name, value in given.items() if not isinstance(value, Tensor)},
        ranges,
        getattr(integer, "sum_ranges", {}),
        integer,
        grids,
        bool(sparse),
    )  # fmt: skip


def _run(
    integer: QdqProgram, args: Any, ranges: dict[str, float], dtypes: dict[str, torch.dtype]
) -> tuple[dict[str, Any], dict[str, Any]]:
    shapes: dict[str, Any] = {}
    hosts: dict[str, Any] = {}

    def note(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            shapes[name] = tuple(value.shape)
            dtypes[name] = value.dtype
        elif isinstance(value, tuple | list):
            if any(isinstance(v, Tensor) for v in value):
                shapes[name] = tuple(tuple(v.shape) for v in value if isinstance(v, Tensor))
            else:
                hosts[name] = value
            for index, member in enumerate(value):
                note(f"{name}[{index}]", member)
        else:
            hosts[name] = value

    def see(step: Step, inputs: Any, made: Any) -> None:
        for name, value in zip(step.outputs, made, strict=False):
            note(name, value)
        if isinstance(step, Add):
            ranges.update(_largest(integer.program, step, inputs))

    for name, value in inputs_of(integer.program, args):
        note(name, value)
    integer.run(args, observe=see)
    return shapes, hosts


def _largest(
    program: Program, step: Add, inputs: tuple[Tensor, ...]
) -> Iterator[tuple[str, float]]:
    """Largest absolute value of each operand of a sum that is kept as accumulators."""
    for index, (ref, value) in enumerate(zip(step.args, inputs, strict=True)):
        if program.values[ref.name].form != "int32":
            continue
        scale = step.scales[index] if step.scales else None
        low = high = value
        if scale is not None:
            axis = step.axis % value.dim()
            others = [i for i in range(value.dim()) if i != axis]
            if others:  # without any, torch would reduce them all
                low, high = value.amin(others), value.amax(others)
            low, high = low * scale.flatten(), high * scale.flatten()
        yield ref.name, max(float(high.max()), -float(low.min()))


def _doubled(value: Any) -> Any:
    return torch.cat([value, value]) if isinstance(value, Tensor) and value.dim() else value


# Which sizes follow the number of voxels, or what a mask chose: the captured graph says it.


def _chooses_rows(integer: QdqProgram) -> bool:
    """Whether a size depends on values, as for ``x[mask]``; it is free in every file."""
    model = integer_model(integer)
    if model is None or model.source is None:
        return False
    made = (node.meta.get("val") for node in model.source.held)
    tensors = (value for value in made if isinstance(value, Tensor))
    return any(_is_found(size) for value in tensors for size in value.shape)


def _are_tables(tensors: list[Tensor], *, chosen: bool) -> bool:
    """Whether inputs are points, or voxels with coordinates, and rows are chosen of them."""
    chosen = chosen or any(x.dim() == _TABLE and not x.is_floating_point() for x in tensors)
    return chosen and all(x.dim() <= _TABLE for x in tensors)


def _fixed_numbers(integer: QdqProgram, free: Mapping[str, Any]) -> set[str]:
    """Symbols of numbers taken from tensors that depend on fixed sizes alone."""
    model = integer_model(integer)
    assert model is not None
    assert model.source is not None
    varying = taken_numbers(model.program, free)
    nodes = {node.name: node for node in model.source.graph.operations}
    items = (s.outputs[0] for s in model.program.steps if s.called == "item")
    fixed = (nodes[n].meta["val"] for n in items if n in nodes and n not in varying)
    return {symbol for number in fixed for symbol in _symbols(number)}


def _free_sizes(
    integer: QdqProgram, shapes: Mapping[str, Any], fixed: Collection[str] = (), *, rows: bool
) -> dict[str, Any]:
    """Shapes with a name in place of every free size.

    `fixed` are symbols of numbers that are the same in every frame. With `rows`, tables have any
    number of rows without voxels, too.
    """
    model = integer_model(integer)
    assert model is not None
    assert model.source is not None
    held = model.source.held
    values = {name: node.meta.get("val") for node, forms in held.items() for name in forms.values()}
    for name, (_, node) in ports_of(model).items():
        values.setdefault(name, node.meta.get("val"))
    counts = _rows(model.program, shapes, values, tables=rows)
    free: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            free[name] = _named(value, shapes.get(name), counts, fixed)
        elif isinstance(value, tuple | list):
            parts = [part for part in value if isinstance(part, Tensor)]
            free[name] = tuple(
                _named(part, shape, counts, fixed)
                for part, shape in zip(parts, shapes.get(name, ()), strict=False)
            )
            free |= {f"{name}[{i}]": sizes for i, sizes in enumerate(free[name])}
    for name, shape in shapes.items():  # coordinates
        if name.endswith(".indices"):
            maker = name.removesuffix(".indices").removesuffix(".sites")
            free.setdefault(name, (f"voxels of {maker}", *shape[1:]))
    return free


def _overlaid(sizes: tuple[Any, ...], found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes of a run, with names for those that depend on values."""
    return tuple(
        _overlaid(size, name)
        if isinstance(size, tuple)
        else name
        if isinstance(name, str)
        else size
        for size, name in zip(sizes, found, strict=True)
    )


def _symbols(size: Any) -> set[str]:
    return (
        {str(s) for s in size.node.expr.free_symbols} if isinstance(size, torch.SymInt) else set()
    )


def _is_found(size: Any, fixed: Collection[str] = ()) -> bool:
    """Whether the size depends on values."""
    return any(symbol.startswith("u") for symbol in _symbols(size).difference(fixed))


def _rows(
    program: Program, shapes: Mapping[str, Any], values: Mapping[str, Any], *, tables: bool
) -> dict[str, str]:
    """Symbols of the graph that stand for a number of input voxels, with a name.

    Also for the rows of other input tables (points, their voxels, sets of voxels), where the model
    accepts any number of them; without voxels if `tables` says so.
    """
    read = {step.args[0].name for step in program.steps if isinstance(step, Coordinates)}
    read |= set(program.sparse_inputs)
    counts = {shapes[name][0] for name in read}
    given = set(names_in(program.signature)) | set(program.sparse_inputs)
    found: dict[str, str] = {}
    others: dict[str, str] = {}
    of_pictures: set[str] = set()
    for name in sorted(given | read):
        value = values.get(name)
        if not isinstance(value, Tensor) or not value.dim():
            continue
        if name not in given:  # a grid's cells follow the number of frames, which is fixed
            others |= dict.fromkeys(_symbols(value.shape[0]), "voxels")
        elif shapes[name][0] in counts:
            found |= dict.fromkeys(_symbols(value.shape[0]), "voxels")
        elif (read or tables) and value.dim() <= _TABLE:
            others |= dict.fromkeys(_symbols(value.shape[0]), f"rows of {name}")
        else:
            of_pictures.update(*map(_symbols, value.shape))
    return {name: what for name, what in others.items() if name not in of_pictures} | found


def _named(
    value: Tensor, shape: tuple[int, ...] | None, rows: Mapping[str, str], fixed: Collection[str]
) -> tuple[int | str, ...]:
    """Sizes, with the expression of one that follows the voxels, given or found."""
    return tuple(
        rows.get(str(n), str(n))
        if _symbols(n) & rows.keys() or _is_found(n, fixed)
        else int(n)
        if shape is None
        else shape[axis]
        for axis, n in enumerate(value.shape)
    )
