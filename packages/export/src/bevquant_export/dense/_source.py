"""A calibrated model as steps in integers, with the size of everything between them.

What an exporter emits is what the simulator, or the model itself, runs step by step, so the two
cannot disagree on which tensors are integers of which scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_export.dense._free_sizes import chooses_rows, free_sizes
from bevquant_export.dense._program_of import QdqProgram, bound, inputs_of, program_of
from bevquant_graph import refilled
from bevquant_int8sim import IntegerModel
from bevquant_int8sim.program import (
    Integers,
    Program,
    Ref,
    SparseRef,
    Step,
    grid_call,
    integers_of,
    is_active,
    module_call,
    names_in,
    replaced,
)

__all__ = [
    "Integers", "Program", "Ref", "Source", "SparseRef", "Step", "grid_call", "integers_of",
    "is_active", "module_call", "names_in", "read_model", "replaced",
]  # fmt: skip

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Source:
    """A program and one or two runs of it.

    Attributes:
        program: Steps in order.
        shapes: Tensor to its shape; of several tensors, a tuple of shapes, and ``name[i]`` to each.
        hosts: Sizes, numbers and the like by name.
        dtypes: Type of each tensor as the program holds it.
        wider: Shapes of a second run with twice the batch; with a name in the place of a size that
            follows the number of voxels. Empty where all sizes are constants.
        wider_hosts: Hosts of that run; those that no voxel changes.
        inputs: Tensors that a call takes, in order, to the parameters that they go to.
        fixed: Numbers among the arguments, which are constants of the file.
        ranges: Accumulators that a sum reads to their largest absolute value in the run.
        sum_ranges: Ranges that sums' operands have in the program itself (`IntegerModel`).
        integer: What the program was read from, to run it again.
        grids: Of sparse tensors among the inputs, by the name of their sites: grid and frames.
            Their coordinates are the input ``<features>.indices``.
        sparse: Whether there are voxels among its tensors.
    """

    program: Program
    shapes: Mapping[str, Any]
    hosts: Mapping[str, Any]
    dtypes: Mapping[str, torch.dtype]
    wider: Mapping[str, Any]
    wider_hosts: Mapping[str, Any]
    inputs: Mapping[str, str]
    fixed: Mapping[str, Any]
    ranges: Mapping[str, float]
    sum_ranges: Mapping[str, float]
    integer: QdqProgram
    grids: Mapping[str, tuple[Shape, int]] = field(default_factory=dict)
    sparse: bool = False

    def form(self, name: str) -> Any:
        """`Integers`, or ``"int32"`` or ``"float"``."""
        return self.program.values[name].form


def read_model(
    model: nn.Module | IntegerModel,
    args: Any,
    *,
    dynamic_batch: bool,
    voxels: bool = False,
    integer_inputs: bool = False,
    integer_sums: bool = False,
    verify: bool = True,
) -> Source:
    """Lower `model` and run it on `args`.

    With `voxels` sparse convolutions may be among its steps: the number of voxels is free then,
    and the number of frames a constant.

    Raises:
        TypeError: No module.
        ValueError: Not calibrated, not traceable, in training mode, a sparse model, inputs of
            another type than float32 (or with `integer_inputs` other floats), or a batch that
            cannot vary.
    """
    for path, value in model.named_parameters() if isinstance(model, nn.Module) else ():
        if value.is_floating_point() and value.dtype != torch.float32:
            raise ValueError(
                f"export_qdq_onnx: parameter {path} is {value.dtype}; expected float32. Call "
                "model.float() before it is quantized and calibrated; the profile says what the "
                "file's floats are"
            )
    integer = program_of(model, args, integer_sums, verify=verify)
    program = integer.program
    sparse = [s.path for s in program.steps if s.op in ("sites", "sparse_conv")]
    sparse += ["an input"] if program.sparse_inputs else []
    if sparse and (not voxels or dynamic_batch):
        raise ValueError(
            f"export_qdq_onnx: {next(filter(None, sparse), 'the model')} is sparse; "
            + (
                "the number of frames is a constant of such files: dynamic_batch=False"
                if voxels
                else "write that part with export_sparse_onnx and the dense parts, each a module "
                "of its own, with export_qdq_onnx, or all of it with profile='onnxruntime'"
            )
        )
    given, called = dict(inputs_of(program, args)), dict(integer.names)
    grids: dict[str, tuple[Shape, int]] = {}
    for name, value in bound(program, args):
        if name in program.sparse_inputs:
            called[f"{name}.indices"] = f"{called[name]}.indices"
            shape = tuple(int(size) for size in value.spatial_shape)
            grids[program.sparse_inputs[name]] = shape, int(value.batch_size)
    for name, value in given.items():
        if sparse or not isinstance(value, Tensor) or value.dtype == torch.float32:
            continue
        if value.is_floating_point() or value.is_complex() or not integer_inputs:
            raise ValueError(
                f"export_qdq_onnx: input {called[name]} is {value.dtype}; expected float32. Give "
                "float32 tensors, and compute what depends on others outside of this model"
            )
    ranges: dict[str, float] = {}
    dtypes: dict[str, torch.dtype] = {}
    shapes, hosts = _run(integer, args, ranges, dtypes)
    wider: dict[str, Any] = {}
    wider_hosts: dict[str, Any] = {}
    if sparse:
        for name in names_in(program.result):  # a sparse tensor's coordinates are a result too
            if program.values[name].form == "sites":
                if name in hosts:
                    shapes[f"{name}.indices"] = tuple(hosts[name].indices.shape)
                dtypes.setdefault(f"{name}.indices", torch.int32)
    if sparse or chooses_rows(integer):
        wider, wider_hosts = free_sizes(integer, shapes, hosts)
    if dynamic_batch:
        double = _doubled(args)
        try:
            wider, wider_hosts = _run(integer, double, {}, {})
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                "export_qdq_onnx: dynamic_batch=True, but the model does not run on twice the "
                f"batch: {error}. Export it with a fixed batch"
            ) from error
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
        elif isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value):
            shapes[name] = tuple(tuple(v.shape) for v in value)
            shapes.update({f"{name}[{i}]": tuple(v.shape) for i, v in enumerate(value)})
            dtypes.update({f"{name}[{i}]": v.dtype for i, v in enumerate(value)})
        else:
            hosts[name] = value

    def see(step: Step, inputs: Any, made: Any) -> None:
        for name, value in zip(step.outputs, made, strict=False):
            note(name, value)
        if step.op == "add":
            ranges.update(_largest(integer.program, step, inputs))

    for name, value in inputs_of(integer.program, args):
        note(name, value)
    integer.run(args, observe=see)
    return shapes, hosts


def _largest(
    program: Program, step: Step, inputs: tuple[Tensor, ...]
) -> Iterator[tuple[str, float]]:
    """Largest absolute value of each operand of a sum that is held as accumulators."""
    for index, (ref, value) in enumerate(zip(step.args, inputs, strict=True)):
        if program.values[ref.name].form != "int32":
            continue
        scale = step.tensors.get(f"scale{index}")
        low = high = value
        if scale is not None:
            axis = step.attributes.get("axis", 0) % value.dim()
            others = [i for i in range(value.dim()) if i != axis]
            if others:  # without any, torch would reduce them all
                low, high = value.amin(others), value.amax(others)
            low, high = low * scale.flatten(), high * scale.flatten()
        yield ref.name, max(float(high.max()), -float(low.min()))


def _doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.cat([value, value]) if value.dim() else value
    if isinstance(value, Mapping):
        return {key: _doubled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return refilled(type(value), [_doubled(item) for item in value])
    return value
