"""Steps without a node in a file: before the first layer, on coordinates alone, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bevquant_export._errors import UnsplitError
from bevquant_graph import op_spec
from bevquant_int8sim.model import COORD_TYPES
from bevquant_int8sim.program import (
    Call,
    Coordinates,
    FloatCall,
    LayoutCall,
    NumberCall,
    Quantize,
    SparseConv,
    Step,
    names_in,
)


@dataclass(frozen=True, eq=False)
class Beginning:
    """The features of the first sparse convolution, and the steps that compute them."""

    features: str  # Name of the value; the float value for features that are rounded
    # Steps of the forward that compute it: means over the points of a voxel, selected or
    # reordered voxels, layers on points
    steps: tuple[Step, ...]


def beginning(program: Any) -> Beginning | None:
    """Return how a program computes the features of its voxels; None where they are an input."""
    makers = {name: step for step in program.steps for name in step.outputs}
    convs = (s for s in program.steps if isinstance(s, SparseConv) or is_float_conv(s))
    first = next(convs, None)
    if first is None:
        return None
    name = first.args[0].name
    while isinstance(makers.get(name), Quantize):
        name = makers[name].args[0].name
    if name not in makers:
        return None
    pending, found = [name], set()
    while pending:
        step = makers.get(pending.pop())
        if step is not None and step.outputs not in found:
            found.add(step.outputs)
            pending += step.inputs
    return Beginning(name, tuple(step for step in program.steps if step.outputs in found))


def is_float_conv(step: Step) -> bool:
    """Whether a step is a sparse convolution that stays float."""
    return type(step.target).__name__ == "FloatSparseConv"


def for_coords(program: Any) -> set[str]:
    """Steps that only the coordinates depend on; the engine gets the coordinates as an input."""
    read = set(names_in(program.result))
    found: set[str] = set()
    for step in reversed(program.steps):
        made = set(step.outputs)
        called = isinstance(step, FloatCall | LayoutCall)
        if called and not made & read and not is_float_conv(step):
            found |= made
        elif not isinstance(step, NumberCall | Coordinates):
            read.update(step.inputs)
    return found


def coord_inputs(program: Any, made: set[str]) -> set[str]:
    """Inputs of the program that only sets of voxels are computed from."""
    wanted: set[str] = set()
    for step in reversed(program.steps):
        if isinstance(step, Coordinates) or wanted.intersection(step.outputs):
            if isinstance(step, Coordinates | Call):
                wanted.update(step.inputs)
    layers = [s for s in program.steps if not isinstance(s, Coordinates | Call)]
    return wanted - made - {name for step in layers for name in step.inputs}


def refuse_rounded_coords(program: Any) -> None:
    """Refuse a file whose coordinates, the first layer's, are rounded ones of a later layer's."""
    makers = {name: step for step in program.steps for name in step.outputs}
    first: dict[str, str] = {}
    for step in program.steps:
        if not isinstance(step, Coordinates):
            continue
        name = exact = step.args[0].name
        rounds = False
        while (maker := makers.get(name)) is not None:
            spec = op_spec(maker.called)
            if not (spec.casts or spec.kind == "identity"):
                break
            given = (*maker.args, *maker.kwargs.values())
            rounds |= not COORD_TYPES.issuperset(v for v in given if isinstance(v, torch.dtype))
            name = getattr(maker.args[0], "name", "") if maker.args else ""
            exact = exact if rounds else name
        if first.setdefault(name, exact) not in (name, exact):
            raise ValueError(
                f"export_sparse_onnx: the first layer reads the coordinates {name!r} through a "
                "type that rounds large ones, such as float16, and a later layer reads others: a "
                "file has one input of coordinates. Keep those of both in int32 or int64"
            )


REMEDY = (
    "export_qdq_onnx(profile='onnxruntime') writes the model as it is; or export it up to there, "
    "or replace that"
)
_NORM = (
    "bevquant_fusion.fuse_model folds a norm that alone reads a convolution, and says in `skipped` "
    "why another is left; a BatchNorm1d on voxels is written as it is, one on a dense grid has no "
    "form here. "
)
_CHOICE = (
    "A file is one fixed graph: what branches on values in Python, or counts with them, has no "
    "form in any dialect, nor for ONNX Runtime. Choose by comparing (x[score > t], which "
    "dialect='portable' has), or export the parts before and behind it, each a module of its own, "
    "and run it between them, as bevquant_int8sim.simulate does"
)
_NORMS = {"BatchNorm1d": _NORM, "batch_norm": _NORM}


BEHIND_DENSE = (
    "export_detector writes the model as two files: this one's part up to dense(), and all behind "
    "it for another engine"
)


_OPERATORS = (
    "sparse convolutions and linear layers on voxels, additions, concatenations and choices of "
    "channels, ReLU, dense(), permute and reshape"
)
_MORE = "pooling, and what a model computes on voxels between its layers"


def no_operator(
    step: Step, where: str, *, reads_map: bool = False, portable: bool = False
) -> ValueError:
    """The error for a step without an operator; `where` is operation, module, file and line."""
    if is_unfollowed(step):
        return ValueError(f"export_sparse_onnx: {where}: {step.reason}. {_CHOICE}")
    remedy = _NORMS.get(step.called, "")
    remedy += BEHIND_DENSE if reads_map else REMEDY
    if portable:
        dialect = f"portable, which has {_OPERATORS}, {_MORE}. Instead, {remedy}"
    else:
        more = f"For ONNX Runtime dialect='portable' has {_MORE}; {remedy}"
        dialect = f"libspconv, which has {_OPERATORS}. {more}"
    return UnsplitError(
        f"export_sparse_onnx: {where} has no operator in the dialect {dialect}", where
    )


def is_unfollowed(step: Step) -> bool:
    """Whether a step is a module that could not be captured."""
    return step.reason.startswith("not followed")


def location(source: Any, step: Step) -> str:
    """File and line of the forward."""
    if source is None:
        return ""
    nodes = (n for n, forms in source.held.items() if step.outputs[0] in forms.values())
    location = next(map(source.graph.location, nodes), "")
    return f" ({location})" if location else ""
