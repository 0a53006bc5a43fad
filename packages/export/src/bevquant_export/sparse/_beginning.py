"""Beginning of a file: the features of the voxels, whatever operations compute them.

Computations on coordinates alone are not part of a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bevquant_graph import leaves
from bevquant_int8sim.model import Step


@dataclass(frozen=True, eq=False)
class Beginning:
    """The features of the first sparse convolution, and the steps that compute them.

    Attributes:
        features: Name of the value; the float value for features that are rounded.
        steps: Steps of the forward that compute it: means over the points of a voxel, selected or
            reordered voxels, layers on points.
    """

    features: str
    steps: tuple[Step, ...]


def beginning(program: Any) -> Beginning | None:
    """Return how a program computes the features of its voxels; None where they are an input."""
    makers = {name: step for step in program.steps for name in step.outputs}
    convs = (s for s in program.steps if s.op == "sparse_conv" or is_float_conv(s))
    first = next(convs, None)
    if first is None:
        return None
    name = first.args[0].name
    while name in makers and makers[name].op == "quantize":
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
    return type(step.module).__name__ == "FloatSparseConv"


def for_coords(program: Any) -> set[str]:
    """Steps that only the coordinates depend on; the engine gets the coordinates as an input."""
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
    """Inputs of the program that only sets of voxels are computed from."""
    wanted: set[str] = set()
    for step in reversed(program.steps):
        if step.op == "sites" or wanted.intersection(step.outputs):
            if step.op in ("sites", "host", "float", "move"):
                wanted.update(step.inputs)
    layers = [s for s in program.steps if s.op not in ("sites", "host", "float", "move")]
    return wanted - made - {name for step in layers for name in step.inputs}


def names_in(value: Any) -> Iterator[str]:
    """Values in the nested containers of a program's result; for sparse tensors the features."""
    for leaf in leaves(value):
        if hasattr(leaf, "coords"):
            yield leaf.features
        elif isinstance(getattr(leaf, "name", None), str):
            yield leaf.name
